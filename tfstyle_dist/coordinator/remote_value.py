"""The result of a scheduled function, before and after it is there."""

from __future__ import annotations

import enum
import threading
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError


class RemoteValueStatus(enum.Enum):
    """Where a result is."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue:
    """The result that a scheduled function will have (``tf.distribute.coordinator.RemoteValue``).

    ``ClusterCoordinator.schedule`` makes it. It may be an argument of another scheduled function, which then runs when
    the result is there and gets the value.

    Args:
        changed: notified, with its lock held, whenever a result comes.
        number: of the call, from 1 on.

    Attributes:
        number: of the call.
    """

    def __init__(self, changed: threading.Condition, number: int = 0) -> None:
        self._changed = changed
        self.number = number
        self._status = RemoteValueStatus.NOT_READY
        self._value: Any = None
        self._error: BaseException | None = None

    # The closure queue calls these with the condition's lock held.

    def set_value(self, value: Any) -> None:
        """The function has returned."""
        self._value, self._status = value, RemoteValueStatus.READY

    def set_error(self, error: BaseException) -> None:
        """The function has failed or was cancelled."""
        self._error, self._status = error, RemoteValueStatus.ABORTED

    def belongs_to(self, changed: threading.Condition) -> bool:
        """Whether it was made by the coordinator with this condition."""
        return self._changed is changed

    def is_ready(self) -> bool:
        """Whether the value is there; to be called with the condition's lock held.

        Raises:
            Exception: the function has failed or was cancelled.
        """
        if self._error is not None:
            raise self._error
        return self._status is RemoteValueStatus.READY

    def get(self, timeout: float | None = None) -> Any:
        """Waits for the result.

        Args:
            timeout: seconds to wait; ``None``: until it is there.

        Returns:
            What the function returned; tensors are CPU tensors.

        Raises:
            Exception: what the function raised, each time.
            CancelledError: it was cancelled because another one failed.
            DeadlineExceededError: it did not come in time.
        """
        deadline = Deadline(None if timeout is None else timedelta(seconds=timeout))
        with self._changed:
            while self._status is RemoteValueStatus.NOT_READY:
                if deadline.passed():
                    raise DeadlineExceededError(
                        f"The result of scheduled function number {self.number} did not come within {deadline}. It may "
                        "still wait for a worker: ask ClusterCoordinator.statistics(), or give a longer timeout."
                    )
                self._changed.wait(deadline.pause())
        if self._error is not None:
            raise self._error
        return self._value

    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the result, with NumPy arrays and numbers in place of tensors.

        Args:
            timeout: as for ``get``.

        Returns:
            What the function returned; a tensor that NumPy lacks, such as a bfloat16 or a sparse one, stays one.

        Raises:
            Exception, CancelledError, DeadlineExceededError: as for ``get``.

        Source: ``tf.distribute.coordinator.RemoteValue.fetch``.
        """
        return nest.map_structure(as_numpy, self.get(timeout))

    def _is_no_value(self, *_: Any) -> Any:
        raise TypeError(
            "A RemoteValue is the result to come of a scheduled function, and no number or tensor. Write "
            "value.fetch(), which waits for it, after the last schedule() of the loop."
        )

    __float__ = __int__ = __round__ = __neg__ = __abs__ = __getitem__ = _is_no_value
    __iter__ = None  # else it would be an Iterable
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_value
    __lt__ = __le__ = __gt__ = __ge__ = _is_no_value

    def __repr__(self) -> str:
        return f"<RemoteValue {self._status.value}>"


def as_numpy(leaf: Any) -> Any:
    """A tensor as a NumPy array, or number if it has no dimensions; one that NumPy lacks as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return leaf.detach().numpy()[()]
    except (TypeError, RuntimeError):  # bfloat16, 8 bits, halves of complex numbers, sparse, nested, quantized
        return leaf
