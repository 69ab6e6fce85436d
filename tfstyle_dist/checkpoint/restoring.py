"""Putting a checkpoint back into objects, for any numbers of workers and replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tfstyle_dist.checkpoint import files
from tfstyle_dist.checkpoint.exchange import exchange
from tfstyle_dist.checkpoint.leaves import Leaf, Match, Read
from tfstyle_dist.checkpoint.listing import checkpoints_in
from tfstyle_dist.checkpoint.reader import CheckpointReader
from tfstyle_dist.checkpoint.restored import Restored
from tfstyle_dist.checkpoint.status import CheckpointLoadStatus
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core.errors import DataLossError, InvalidArgumentError, NotFoundError
from tfstyle_dist.core.logging import get_logger


def restore(
    group: WorkerGroup, path: str, leaves: Sequence[Leaf], optional: Collection[str], what: str
) -> CheckpointLoadStatus:
    """Reads a checkpoint into objects; collective.

    Nothing is changed before all workers have found the checkpoint whole and fit for their objects.

    Args:
        group: the workers that restore together.
        path: the checkpoint.
        leaves: the objects.
        optional: names of objects that may be missing.
        what: the call that restores, for messages.

    Raises:
        NotFoundError: there is no such checkpoint.
        DataLossError: it is damaged; the message names the file and the other checkpoints.
        InvalidArgumentError: shapes, dtypes or kinds differ; the message lists them all.
        CollectiveMismatchError: the workers restore different checkpoints.
    """
    error: Exception | None = None
    found: dict[str, Match] = {}
    restored, saved = None, ""
    try:
        reader = CheckpointReader(path)
        restored = Restored(reader, optional)
        saved = reader.content["data"]
        files.verify(path, reader.content, group.rank, group.size)
        reader.check()
        found = restored.match(leaves)
    except (AttributeError, KeyError, TypeError) as failure:
        error = DataLossError(f"The index of checkpoint {path!r} lacks what its objects need: {failure!r}.")
    except Exception as failure:
        error = failure
    failed = f"Checkpoint {path!r} was not restored (nothing was changed)"
    others = [other for other in checkpoints_in(_folder_of(path)) if other != path]
    if isinstance(error, DataLossError) and others:
        error = DataLossError(f"{error} Other checkpoints in that folder: {', '.join(others)}.")
    same = {"path": path, "data": saved if not error else ""}
    told = exchange(group, what, failed, error, same=same, takes=_who_takes_itself(leaves, found))
    assert restored is not None
    read = restored.reading()
    matched = [leaf for leaf in leaves if leaf.path in found]
    trees = {leaf.path: restored.objects[leaf.path]["tree"] for leaf in matched}
    taking = {name for other in told for name in other["takes"]}  # hooks may be on some workers only
    _first_who_may_refuse(group, [leaf for leaf in matched if leaf.path in taking], trees, read, (what, failed))
    for leaf in matched:
        if leaf.path not in taking:
            leaf.worker = group.own_number
            leaf.load(trees[leaf.path], read)
    read.servers.run()
    restored.note(leaves, found)
    return CheckpointLoadStatus(restored)


def _first_who_may_refuse(
    group: WorkerGroup, leaves: Sequence[Leaf], trees: Mapping[str, Any], read: Read, failed: tuple[str, str]
) -> None:
    """Gives objects their state that take it themselves; if one refuses, all on all workers get back what they had.

    The workers meet after each, because variables are read and written by all of them at once.
    """
    undo: dict[str, Callable[[], None]] = {}
    what, text = failed
    for leaf in leaves:
        error: Exception | None = None
        leaf.takes_itself = True
        try:
            undo[leaf.path] = leaf.keep()
            leaf.load(trees[leaf.path], read)
        except (DataLossError, NotFoundError) as failure:
            error = failure
        except Exception as failure:
            error = InvalidArgumentError(f"{leaf.path} did not take its saved state: {failure}")
            error.__cause__ = failure
        try:
            exchange(group, f"{what}: {leaf.path} has taken its state", text, error)
        except Exception:
            _put_back(undo)
            raise


def _who_takes_itself(leaves: Sequence[Leaf], found: Mapping[str, Match]) -> list[str]:
    return [leaf.path for leaf in leaves if leaf.takes_itself and leaf.path in found]


def _put_back(undo: Mapping[str, Callable[[], None]]) -> None:
    for path, put_back in undo.items():
        try:
            put_back()
        except Exception as error:  # the first one is raised
            get_logger().error("%s did not take back what it had before the restore: %s", path, error)


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0] or "."
