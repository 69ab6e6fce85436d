"""Which worker a thread runs a scheduled function for."""

from __future__ import annotations

from contextvars import ContextVar

_index: ContextVar[int | None] = ContextVar("tfstyle_dist_worker_index", default=None)


class on_worker:
    """Context manager: inside, this is worker ``index``."""

    __slots__ = ("_number", "_token")

    def __init__(self, index: int) -> None:
        self._number = index

    def __enter__(self) -> None:
        """Sets the number for this thread."""
        self._token = _index.set(self._number)

    def __exit__(self, *error: object) -> None:
        """Puts back what was there before."""
        _index.reset(self._token)


def experimental_get_current_worker_index() -> int:
    """The number of the worker that runs the calling function.

    Raises:
        RuntimeError: called outside of a scheduled function and of a function that makes per-worker data.

    Example:
        >>> coordinator.fetch(coordinator.schedule(experimental_get_current_worker_index)) in (0, 1)  # two workers
        True

    Source: ``tf.distribute.coordinator.experimental_get_current_worker_index``.
    """
    index = _index.get()
    if index is None:
        raise RuntimeError(
            "experimental_get_current_worker_index must be called inside a function scheduled by a ClusterCoordinator, "
            "or inside the function given to create_per_worker_dataset or create_per_worker_resource."
        )
    return index
