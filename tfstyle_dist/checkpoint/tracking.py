"""Finding the objects that a checkpoint holds, and the workers that save it together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.checkpoint import leaves as kinds
from tfstyle_dist.checkpoint.leaves import Leaf
from tfstyle_dist.checkpoint.optimizer_leaves import OptimizerLeaf, ParameterNames, has_usual_state
from tfstyle_dist.checkpoint.random_leaf import RandomStateLeaf
from tfstyle_dist.checkpoint.random_state import RandomState
from tfstyle_dist.comm.data_axis import DataAxis
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core import launch_env
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.contexts import get_strategy, has_strategy
from tfstyle_dist.variables import find_record

Replace = Callable[[Any], None]
_registered: list[tuple[type, Callable[[str, Any], Any]]] = []


def register(kind: type, make: Callable[[str, Any], Any]) -> None:
    """Lets checkpoints hold objects of a room above this one, or of another library.

    Args:
        kind: their class; the class registered last is asked first.
        make: gives the leaf of a path and an object; or path, object and a class whose third argument is the
            ``ParameterNames`` of the other leaves.
    """
    _registered[:] = [(kind, make), *(entry for entry in _registered if entry[0] is not kind)]


def find_leaves(
    tracked: Mapping[str, Any], counters: Mapping[str, int], replace: Callable[[str, Any], None]
) -> list[Leaf]:
    """The objects in what a checkpoint tracks, by name; dicts, lists and nested checkpoints are gone through.

    Args:
        tracked: the objects by name.
        counters: numbers of the checkpoint's own.
        replace: puts another value in the place of a plain one.

    Raises:
        TypeError: something a checkpoint cannot hold.
        ValueError: two entries have one name, or a container holds itself.
    """
    found: list[Leaf | tuple[str, Any, type]] = []
    for name, value in tracked.items():
        found += _walk(name, value, functools.partial(replace, name))
    found += [kinds.CounterLeaf(name, value, functools.partial(replace, name)) for name, value in counters.items()]
    names = ParameterNames(leaf for leaf in found if isinstance(leaf, Leaf))
    leaves = [leaf if isinstance(leaf, Leaf) else leaf[2](leaf[0], leaf[1], names) for leaf in found]
    _check_names(leaves)
    return leaves


def _check_names(leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if two entries have one name: one of them would be lost."""
    known = set[str]()
    for leaf in leaves:
        if leaf.path in known:
            raise ValueError(
                f"Two entries of the checkpoint are called {leaf.path!r}: a key counts by its text, so that 1 and '1' "
                "are one name, and '/' stands between the names of nested entries. Give one of them another key."
            )
        known.add(leaf.path)


def _walk(path: str, value: Any, replace: Replace, within: tuple[int, ...] = ()) -> Iterator[Any]:
    if id(value) in within:
        raise ValueError(
            f"{path} is a {type(value).__name__} that holds itself, so there is no end to its names. Track what it "
            "holds without it."
        )
    nested: Any = getattr(value, "_tfstyle_tracked", None)
    entries: Iterable[tuple[Any, Any]]
    held = value
    if nested is not None:
        held, entries = nested, nested.items()
    elif isinstance(value, Mapping) and _has_objects(value.values()):
        entries = value.items()
    elif isinstance(value, list | tuple) and _has_objects(value):
        entries = enumerate(value)
    else:
        yield _leaf(path, value, replace)
        return
    put = _in_tuple(value, replace) if isinstance(value, tuple) else functools.partial(_set, held)
    for key, entry in entries:
        yield from _walk(f"{path}/{key}", entry, functools.partial(put, key), (*within, id(value)))


def _in_tuple(value: tuple[Any, ...], replace: Replace) -> Callable[[Any, Any], None]:
    """How to replace entries of a tuple: by another tuple in its place."""
    entries = list(value)

    def put(place: int, entry: Any) -> None:
        entries[place] = entry
        replace(value._make(entries) if hasattr(value, "_make") else tuple(entries))

    return put


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _leaf(path: str, value: Any, replace: Replace) -> Any:
    for kind, make in _registered:
        if isinstance(value, kind):
            return make(path, value)
    if isinstance(value, torch.Tensor):
        return kinds.TensorLeaf(path, value)
    if isinstance(value, torch.nn.Module):
        return kinds.ModuleLeaf(path, value)
    if isinstance(value, torch.optim.Optimizer):
        return (path, value, OptimizerLeaf) if has_usual_state(value) else kinds.StatefulLeaf(path, value)
    if isinstance(value, RandomState):
        return path, value, RandomStateLeaf
    if isinstance(value, torch.Generator):
        return kinds.GeneratorLeaf(path, value)
    if _stateful(value):
        return kinds.StatefulLeaf(path, value)
    return kinds.ValueLeaf(path, value, replace)


def _stateful(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _has_objects(values: Iterable[Any], within: tuple[int, ...] = ()) -> bool:
    """Whether containers hold something with a state of its own; else they are values."""
    for value in values:
        if isinstance(value, torch.Tensor | torch.Generator) or _stateful(value):
            return True
        if hasattr(value, "_tfstyle_tracked") or isinstance(value, tuple(kind for kind, _ in _registered)):
            return True
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if inner and id(value) not in within and _has_objects(inner, (*within, id(value))):
            return True
    return False


def worker_of(leaves: Sequence[Leaf], what: str) -> Worker:
    """The worker, with its group, that makes a call: of the strategy in force, or of the one that owns the objects.

    Args:
        leaves: what is saved or restored.
        what: the call, for messages.

    Raises:
        RuntimeError: called in replica context, or one of several workers has no strategy to go by.
    """
    frame = current_frame()
    if frame is not None and frame.replica is not None:
        raise RuntimeError(
            f"{what} must be called in cross-replica context, on all workers, not in replica context (inside "
            "strategy.run). Call it after run."
        )
    if has_strategy():
        return get_strategy().worker
    records = [find_record(tensor) for leaf in leaves for tensor in leaf.tensors()]
    workers = [record.store.worker for record in records if record is not None]
    if workers:
        return max(workers, key=lambda worker: worker.group.everyone.size)
    launch = launch_env.launch()
    if launch is not None and launch.world_size > 1:
        raise RuntimeError(
            f"{what} on worker {launch.rank} of {launch.world_size}: no object in the checkpoint belongs to a strategy "
            "and none is in force, so all workers would write the same files. Call it inside strategy.scope()."
        )
    return get_strategy().worker


def group_of(leaves: Sequence[Leaf], what: str) -> WorkerGroup:
    """The workers that save or restore together: all of them, also where several hold one replica.

    Arguments and errors as for ``worker_of``.
    """
    group = worker_of(leaves, what).group
    return group.world if isinstance(group, DataAxis) else group
