"""Typed errors of the whole package.

Each class derives from the Python class that states the same idea, so ``except ValueError`` keeps working, and carries
the name TensorFlow uses for it (``tf.errors``) where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence


class InvalidArgumentError(ValueError):
    """An argument has a wrong value, shape or dtype (``tf.errors.InvalidArgumentError``)."""


class OutOfRangeError(IndexError):
    """An iterator is past its end (``tf.errors.OutOfRangeError``)."""


class NotFoundError(LookupError):
    """A named thing does not exist (``tf.errors.NotFoundError``)."""


class DataLossError(OSError):
    """A file is damaged: not what was written (``tf.errors.DataLossError``)."""


class UnavailableError(RuntimeError):
    """A task that is needed cannot be reached (``tf.errors.UnavailableError``)."""


class AbortedError(RuntimeError):
    """A call was broken off (``tf.errors.AbortedError``); programs catch it beside ``UnavailableError``.

    This package raises ``UnavailableError`` where TensorFlow raises either.
    """


class CancelledError(RuntimeError):
    """The operation was cancelled because another part failed (``tf.errors.CancelledError``)."""


class DeadlineExceededError(TimeoutError):
    """A wait passed its deadline (``tf.errors.DeadlineExceededError``)."""


class PeerLostError(UnavailableError, ConnectionError):
    """A worker of the group died, stopped or left while others waited for it."""


class CollectiveMismatchError(RuntimeError):
    """Replicas or workers that must make the same call made different ones.

    Args:
        message: what the user reads.
        calls: what each of them called, in order of their numbers.
    """

    def __init__(self, message: str, calls: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.calls = tuple(calls)


class WrongContextError(RuntimeError):
    """A call was made in replica context that belongs in cross-replica context, or the other way round."""


class ReplicaAborted(BaseException):
    """Unwinds a replica after another one failed.

    A ``BaseException``, so that a replica's own ``except Exception`` cannot swallow it: an exception inside
    ``merge_call`` aborts the whole ``run`` as it does in TensorFlow.
    """
