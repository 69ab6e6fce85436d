"""Objects that are attached to a ``Checkpoint`` after ``restore``: they take their saved state when they come.

Each worker reads for itself what its own object needs: that the checkpoint is whole, all have seen in ``restore``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfstyle_dist.checkpoint import codec
from tfstyle_dist.checkpoint.leaves import Leaf, Match, Read, ValueLeaf
from tfstyle_dist.checkpoint.optimizer_leaves import OptimizerLeaf
from tfstyle_dist.checkpoint.restored import Restored
from tfstyle_dist.checkpoint.tracking import group_of
from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError

_WHAT = "Attaching an object to a Checkpoint that was restored"
_PLAIN = (type(None), bool, int, float, str)


class Later:
    """What a checkpoint may still have for objects that a ``Checkpoint`` does not have yet.

    Args:
        restored: what the objects have taken so far.
        root: the ``Checkpoint`` that was restored.
        prefix: under which name, with a slash, ``root`` has the one that objects are attached to; empty for itself.
    """

    def __init__(self, restored: Restored, root: Any, prefix: str = "") -> None:
        self.restored, self.root, self.prefix = restored, weakref.ref(root), prefix

    def __deepcopy__(self, memo: dict[int, Any]) -> Later:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_another_process, ()


def _of_another_process() -> Later:
    """What becomes of it in a pickled ``Checkpoint``, to which nothing comes later."""
    later = Later.__new__(Later)
    later.root, later.prefix = lambda: None, "gone/"  # type: ignore[assignment]
    return later


def begin(root: Any, restored: Restored | None) -> None:
    """From now on what is attached to ``root`` takes its state from the checkpoint that was just restored.

    Earlier checkpoints are asked for what this one does not have.
    """
    if restored is None:
        return
    living = [later for later in root._later if later.root() is not None]
    earlier = [later for later in living if later.restored.left() - restored.objects.keys()]
    root._later = [*earlier, Later(restored, root)]
    _spread(root)


def attached(checkpoint: Any, name: str, value: Any) -> None:
    """Gives what has just been attached to a ``Checkpoint``, or to one below it, its state.

    Args:
        checkpoint: it has ``value`` already.
        name: its name there.
        value: plain values stay what they were set to.

    Raises:
        InvalidArgumentError: the object does not fit, or did not take its state.
        NotFoundError: the checkpoint was deleted since it was restored.
        RuntimeError: called in replica context.
    """
    if isinstance(value, _PLAIN):
        return
    loaded: set[str] = set()
    for later in reversed(checkpoint._later):  # the one that was restored last counts
        root, path = later.root() if later.prefix else checkpoint, f"{later.prefix}{name}/"
        if root is not None:
            try:
                _take(later.restored, root._leaves(), path, loaded)
            except NotFoundError as error:
                raise NotFoundError(
                    f"{name!r} was attached to a Checkpoint that was restored from {later.restored.reader.path!r}, "
                    "which has its state but was deleted since then. Attach it before, keep more checkpoints "
                    "(max_to_keep), or attach it to a new Checkpoint if its state is not wanted."
                ) from error
            _spread(root)
    checkpoint._later = [later for later in checkpoint._later if later.root() is not None and later.restored.left()]


def _take(restored: Restored, leaves: Sequence[Leaf], path: str, loaded: set[str]) -> None:
    new = [leaf for leaf in leaves if f"{leaf.path}/".startswith(path) and leaf.path not in restored.found]
    new = [leaf for leaf in new if not isinstance(leaf, ValueLeaf)]
    if not any(leaf.path in restored.objects for leaf in new):
        restored.note(new, {})
        return
    number = group_of(leaves, _WHAT).own_number
    asked = [leaf for leaf in new if leaf.path not in loaded]
    found, read = restored.match(asked), restored.reading()
    for leaf in asked:
        if leaf.path in found:
            leaf.worker = number
            _load(leaf, restored.objects[leaf.path]["tree"], read)
    for leaf in leaves:
        if isinstance(leaf, OptimizerLeaf):
            _complete(restored, leaf, read)
    read.servers.run()
    known = {leaf.path: restored.objects.get(leaf.path) for leaf in new if leaf.path in loaded}
    taken = {name: Match(used=set(codec.tensor_names(about["tree"]))) for name, about in known.items() if about}
    restored.note(new, {**found, **taken})
    loaded.update(found)


def _complete(restored: Restored, leaf: OptimizerLeaf, read: Read) -> None:
    """An optimizer that came before the module whose parameters it updates takes the state of those alone."""
    before = restored.found.get(leaf.path)
    if before is None or not before.missing:
        return
    tree = restored.objects[leaf.path]["tree"]
    now = leaf.match(tree, restored.reader.content["tensors"])
    if len(now.missing) < len(before.missing):
        leaf.add(tree, read, before.used)
        restored.found[leaf.path] = Match(used=before.used | now.used, missing=now.missing)


def _load(leaf: Leaf, tree: Any, read: Any) -> None:
    undo = leaf.keep() if leaf.takes_itself else None
    try:
        leaf.load(tree, read)
    except Exception as error:
        if undo is None:
            raise
        undo()
        raise InvalidArgumentError(f"{leaf.path} did not take its saved state: {error}") from error


def _spread(root: Any) -> None:
    """Tells the ``Checkpoint`` objects below one that was restored what may come for them."""
    for path, inner in _checkpoints(root._tfstyle_tracked, "", (id(root),)):
        others = [later for later in inner._later if later.root() is not root]
        own = [Later(later.restored, root, f"{path}/") for later in root._later if later.root() is root]
        inner._later = [*others, *own]


def _checkpoints(entries: Mapping[Any, Any], prefix: str, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        if id(value) in within:
            continue
        nested = getattr(value, "_tfstyle_tracked", None) if hasattr(value, "_later") else None
        if nested is not None:
            yield f"{prefix}{key}", value
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        inner = inner if nested is None else nested
        if isinstance(inner, Mapping):
            yield from _checkpoints(inner, f"{prefix}{key}/", (*within, id(value)))
