"""One short exchange between the workers: whether all of them got so far, and what each has to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core.errors import (
    CollectiveMismatchError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DataLossError, NotFoundError, InvalidArgumentError, ValueError, TypeError)
}


def _describe(error: BaseException | None) -> dict[str, Any] | None:
    """An error as JSON."""
    if error is None:
        return None
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), None)
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror and error.errno:
        text = error.strerror + (f" ({error.filename})" if error.filename else "")
    return {"kind": kind, "errno": number, "text": text}


def exchange(
    group: WorkerGroup, name: str, failed: str, error: BaseException | None, **facts: Any
) -> list[dict[str, Any]]:
    """Tells the others whether this worker got so far; raises on all of them if one did not.

    Args:
        group: the workers.
        name: of the call; all must make the same.
        failed: what has failed then, as the beginning of a message.
        error: of this worker, or ``None``.
        **facts: what else to tell, as JSON; under ``same`` what must be equal on all workers.

    Returns:
        What each worker told.

    Raises:
        OSError: a worker could not read or write; everywhere the same kind.
        Exception: this worker's own error; or its kind, or UnavailableError, for another's.
        CollectiveMismatchError: the workers do not mean the same.
        PeerLostError, DeadlineExceededError: a worker did not come.
    """
    told = group.gather_objects({"error": _describe(error), **facts}, name)
    for worker, other in enumerate(told):
        if other["error"] is not None:
            where = f" on worker {worker}" if group.size > 1 else ""
            _raise(failed + where, other["error"], error if worker == group.rank else None)
    if any(other.get("same") != told[0].get("same") for other in told):
        lines = "\n".join(f"  worker {worker}: {other.get('same')}" for worker, other in enumerate(told))
        paths = {str(other["same"].get("path")) for other in told if isinstance(other.get("same"), dict)}
        if len(paths) > 1:
            lines += (
                "\nAll give one path, on a disk that they share: the folders of their own that TensorFlow's tutorials "
                "give to all but the chief are not needed here (docs/checkpoints.md)."
            )
        raise CollectiveMismatchError(
            f"The workers do not make the same call, {name}:\n{lines}", [str(o) for o in told]
        )
    return told


def by_one(group: Any, name: str, failed: str, action: Callable[[], Any]) -> Any:
    """One worker does something for all; if it is lost, the next one does it.

    Args:
        group: one whose ``one_writes`` is true.
        name: of the call; all must make the same.
        failed: what has failed then, as the beginning of a message.
        action: what to do; its result is JSON.

    Returns:
        The result, on all workers.

    Raises:
        OSError, Exception: as ``exchange``.
    """

    def attempt() -> dict[str, Any]:
        try:
            return {"error": None, "value": action()}
        except Exception as error:
            return {"error": _describe(error), "value": None}

    told = group.by_one(attempt, name)
    if told["error"] is not None:
        _raise(failed, told["error"])
    return told["value"]


def _raise(failed: str, described: dict[str, Any], own: BaseException | None = None) -> None:
    """Raises what ``_describe`` described, by its kind."""
    text = f"{failed}: {described['text']}"
    kind = _KINDS.get(described["kind"] or "")
    if kind is not None:
        raise kind(text) from own
    if described["errno"] is not None:
        raise OSError(described["errno"], text) from own
    if own is not None:
        own.add_note(failed)
        raise own
    raise UnavailableError(text)
