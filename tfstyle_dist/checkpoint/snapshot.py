"""What is saved: names with tensors, and which worker writes which."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec
from tfstyle_dist.checkpoint.leaves import Leaf
from tfstyle_dist.checkpoint.on_servers import Source, source_of
from tfstyle_dist.comm import mesh
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.logical_state import read_logical


@dataclass
class _Item:
    """A tensor to be saved.

    ``owner`` is the worker that writes it, or ``None``: any may, because all have the same. ``logical``: its record
    knows its value and who has it. ``private``: the other workers have their own. ``source``: where on parameter
    servers it is.
    """

    tensor: torch.Tensor
    owner: int | None
    logical: bool
    private: bool
    source: Source | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Snapshot:
    """The state of some objects.

    Args:
        leaves: the objects.
        worker: number of this worker.

    Attributes:
        objects: kind, class and state of each object, as JSON, by name.
        own: states that each worker has for itself, by name.

    Raises:
        TypeError: a state that a checkpoint cannot hold.
    """

    def __init__(self, leaves: Sequence[Leaf], worker: int) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.own: dict[str, Any] = {}
        self._items: dict[str, _Item] = {}
        self._worker = worker
        self._names: dict[int, str] = {}
        for leaf in leaves:
            tree = leaf.encode(lambda name, tensor, leaf=leaf: self._put(leaf, name, tensor))  # type: ignore[misc]
            if leaf.per_worker:
                self.own[leaf.path], tree = tree, {}
            about = {"kind": leaf.kind, "class": type(leaf.target).__qualname__, "tree": tree}
            self.objects[leaf.path] = about

    def _put(self, leaf: Leaf, name: str, tensor: torch.Tensor) -> str:
        if (known := self._names.get(id(tensor))) is not None and not leaf.per_worker:
            return known  # a tied parameter
        if leaf.per_worker:
            name = f"{name}/worker_{self._worker}"
        unique, number = name, 1
        while unique in self._items:
            unique, number = f"{name}~{number}", number + 1
        if leaf.per_worker:
            item = _Item(tensor, self._worker, logical=False, private=True)
        else:
            self._names[id(tensor)] = unique
            source = source_of(tensor)
            if source is None and tensor.is_meta:
                raise TypeError(f"{name} is on the meta device: it has no values that a checkpoint could hold.")
            logical = source is None and (leaf.same_on_all is None or find_record(tensor) is not None)
            item = _Item(tensor, None if leaf.same_on_all else 0, logical, private=False, source=source)
        self._items[unique] = item
        return unique

    def describe(self) -> str:
        """What must be the same on all workers, in short."""
        items = [(name, item.tensor) for name, item in self._items.items() if not item.private]
        shapes = [None if codec.is_part(name) else list(tensor.shape) for name, tensor in items]
        lines = [f"{name} {shape} {tensor.dtype}" for (name, tensor), shape in zip(items, shapes, strict=True)]
        mark = hashlib.blake2b("\n".join([*self.objects, *lines]).encode(), digest_size=8).hexdigest()
        names = ", ".join(f"{path} ({about['class']})" for path, about in self.objects.items())
        return f"{len(lines)} tensors of {names}, digest {mark}"

    def resolve(self) -> None:
        """Reads what must be read across the replicas; collective.

        Raises:
            ValueError: an ``ON_READ`` variable of aggregation NONE.
        """
        for item in self._items.values():
            if mesh.is_divided(item.tensor):
                record = find_record(item.tensor)
                item.tensor, item.owner, item.logical = item.tensor.detach(), None, False
                item.facts = {"kind": "tensor" if record is None else record.kind}
        logical = [item for item in self._items.values() if item.logical]
        for item, found in zip(logical, read_logical([item.tensor for item in logical]), strict=True):
            item.tensor, item.facts = found.value, found.facts
            item.owner = None if found.same_on_all else 0
        for item in self._items.values():
            if not item.logical and item.source is None:
                item.tensor = item.tensor.detach()

    def share(self, worker: int, workers: int) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        """The tensors that one worker writes, with what the index file says of them.

        What all workers have alike is shared out so that each writes about the same number of bytes. Of a tensor that
        is divided over workers the whole is put together, one tensor at a time, and its writer keeps it; collective
        over them.
        """
        load = [0] * workers
        here = {name: item for name, item in self._items.items() if item.source is None}
        for item in here.values():
            if item.owner == 0 and not item.private:
                load[0] += _bytes(item.tensor)
        chosen = {name for name, item in here.items() if item.owner == worker}
        free = [(name, item.tensor) for name, item in here.items() if item.owner is None]
        for name, tensor in sorted(free, key=lambda entry: (-_bytes(entry[1]), entry[0])):
            writer = min(range(workers), key=lambda w: (load[w], w))
            load[writer] += _bytes(tensor)
            if writer == worker:
                chosen.add(name)
        mine = {}
        for name, item in self._items.items():
            tensor = item.tensor
            if mesh.is_divided(tensor):
                tensor = mesh.whole(tensor)
                item.tensor = tensor.to("meta")
            if name in chosen:
                mine[name] = tensor
        facts = {
            name: {
                "shape": list(item.tensor.shape),
                "dtype": str(item.tensor.dtype).removeprefix("torch."),
                **item.facts,
            }
            for name, item in self._items.items()
            if name in mine or (item.source is not None and worker == 0)
        }
        return mine, facts

    def sources(self) -> dict[str, Source]:
        """The tensors that parameter servers write, by name."""
        return {name: item.source for name, item in self._items.items() if item.source is not None}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
