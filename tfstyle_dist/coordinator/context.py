"""Which worker a thread runs a scheduled function for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_index: ContextVar[int | None] = ContextVar("tfstyle_dist_worker_index", default=None)


@contextmanager
def on_worker(index: int) -> Iterator[None]:
    """Inside, this is worker ``index``."""
    token = _index.set(index)
    try:
        yield
    finally:
        _index.reset(token)


def experimental_get_current_worker_index() -> int:
    """The number of the worker that runs the calling function.

    Raises:
        RuntimeError: called outside of a scheduled function and of a function that makes per-worker data.

    Example:
        >>> coordinator.fetch(coordinator.schedule(experimental_get_current_worker_index))
        0

    Source: ``tf.distribute.coordinator.experimental_get_current_worker_index``.
    """
    index = _index.get()
    if index is None:
        raise RuntimeError(
            "experimental_get_current_worker_index must be called inside a function scheduled by a ClusterCoordinator, "
            "or inside the function given to create_per_worker_dataset or create_per_worker_resource."
        )
    return index
