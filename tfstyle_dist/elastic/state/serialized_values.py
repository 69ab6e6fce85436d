"""Values of attributes as JSON-able descriptions and tensors, and making them again in the same objects elsewhere.

All workers run the same program, so what cannot be sent (functions, hooks, devices) is what the receiver has in its
place.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.elastic.connections.packets import JSON_TYPES, check_can_be_sent
from tfstyle_dist.elastic.state.tensor_numbers import numbered
from tfstyle_dist.variables.content import copies
from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.content.copies import CONTAINERS, MOST_ENTRIES, PLAIN_TENSORS
from tfstyle_dist.variables.content.parameter_marks import memory_of
from tfstyle_dist.variables.content.stand_ins import meant_by

_MOST_DEPTH = 20
_KEEP: list[Any] = ["k"]
_NUMBERS = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"})
_EMPTY: dict[str, type[dict[Any, Any]]] = {kind.__name__: kind for kind in (OrderedDict, defaultdict, Counter)}
MISSING = object()
"""There is no such value."""


class ValueWriter:
    """Describes values.

    Args:
        contents: what the objects of the program hold.

    Attributes:
        tensors: those that descriptions name by number.
        left_out: what each worker keeps of its own, because it is not sent.
        arrays: those of numpy among what was described.
    """

    def __init__(self, contents: ReplicaContents) -> None:
        self.tensors: list[torch.Tensor] = []
        self.left_out: list[Any] = []
        self.arrays: list[np.ndarray] = []
        self._contents = contents

    @cached_property
    def _parameters(self) -> dict[int, int]:
        return {id(parameter): number for number, parameter in numbered(self._contents)}

    @cached_property
    def _objects(self) -> dict[int, int]:
        return {id(meant_by(thing)): content.number for thing, content in self._contents.objects()}

    def number_of(self, thing: Any) -> int | None:
        """That of an object that is content."""
        return self._objects.get(id(thing))

    def describe(self, value: Any) -> tuple[list[Any], list[torch.Tensor], list[Any]]:
        """One value by itself: its description, the tensors that it names from 0 on, and what is left out."""
        self.tensors, self.left_out, self.arrays = [], [], []
        described = self.value(value)
        return described, self.tensors, self.left_out

    def value(self, value: Any, depth: int = 0) -> list[Any]:
        """The description of a value; its tensors are added to ``tensors``."""
        kind = type(value)
        if kind in JSON_TYPES:
            return ["v", value]
        if isinstance(value, np.ndarray):
            self.arrays.append(value)
        if id(value) in self._parameters:
            return ["p", self._parameters[id(value)]]
        if (number := self.number_of(value)) is not None:
            return ["o", number]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic | np.ndarray) and value.dtype.name in _NUMBERS and value.dtype.isnative:
            return ["n", self.put(torch.from_numpy(np.array(value))), isinstance(value, np.ndarray)]
        if isinstance(value, random.Random):
            return ["r", value.getstate()]
        if depth > _MOST_DEPTH or not _is_container(value) or len(value) > MOST_ENTRIES:
            return self._leave_out(value)
        if isinstance(value, dict):
            entries = [[self.value(k, depth + 1), self.value(v, depth + 1)] for k, v in value.items()]
            return ["d", entries, kind.__name__]
        parts = [self.value(part, depth + 1) for part in (sorted(value, key=repr) if isinstance(value, set) else value)]
        if kind not in CONTAINERS and not isinstance(value, tuple):
            return ["b", parts, self.value(vars(value), depth + 1)]
        if kind is deque:
            return ["l", parts, "deque", value.maxlen]
        return ["u" if isinstance(value, tuple) else "e" if kind is set else "l", parts]

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if sparse_parts.is_sparse(value):
            return ["s", [self.put(part) for part in sparse_parts.parts_of(value)], sparse_parts.about(value)]
        if not is_sent_as_tensor(value):
            return self._leave_out(value)
        return ["t", self.put(value.detach())]

    def put(self, value: torch.Tensor) -> int:
        """Adds a tensor; returns its number."""
        check_can_be_sent(value)
        self.tensors.append(value)
        return len(self.tensors) - 1

    def _leave_out(self, value: Any) -> list[Any]:
        self.left_out.append(value)
        return _KEEP


def is_long(value: Any) -> bool:
    """Whether a value is a container with more entries than are sent."""
    return _is_container(value) and len(value) > MOST_ENTRIES


def _is_container(value: Any) -> bool:
    """A list, dict, set or deque, or a tuple, maybe with names, whose class has not made something else of it."""
    kind = type(value)
    if kind in CONTAINERS or copies.has_attributes_beside(value):
        return True
    return isinstance(value, tuple) and kind.__len__ is tuple.__len__ and kind.__iter__ is tuple.__iter__


def memories_among(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each tensor the first one whose memory it shares, by number."""
    first: dict[int, int] = {}
    found = [memory_of(tensor) for tensor in tensors]
    return [first.setdefault(memory, number) if memory else number for number, memory in enumerate(found)]


def is_sent_as_tensor(value: Any) -> bool:
    """Whether a value is a dense tensor, and none that gets gradients."""
    if type(value) not in PLAIN_TENSORS or value.layout is not torch.strided or value.is_nested:
        return False
    return not (value.requires_grad and value.is_leaf)


class ValueReader:
    """Makes values of descriptions, in the containers and tensors that are there where they fit.

    Args:
        contents: what the objects of the program hold.
        tensors: those that descriptions name by number.
        writes_arrays: whether numpy arrays that are there are filled; those of one replica may be another one's too.
        memories: of each of the tensors, as ``memories_among`` gave it: what shares memory here, and did not where it
            comes from, does so no more. ``None``: not known.

    Attributes:
        tensors: these.
    """

    def __init__(
        self,
        contents: ReplicaContents,
        tensors: Sequence[torch.Tensor] = (),
        writes_arrays: bool = False,
        memories: Sequence[int] | None = None,
    ) -> None:
        self.tensors, self._writes_arrays = tensors, writes_arrays
        self._contents, self._memories = contents, memories
        self._written: dict[int, int] = {}  # by memory here: the memory that its values come from

    def may_write(self, own: Any, number: int) -> bool:
        """Whether a tensor that is there has memory for the tensor of this number, and for none of other memory."""
        if self._memories is None or not (memory := memory_of(own)):
            return True
        return self._written.setdefault(memory, self._memories[number]) == self._memories[number]

    @cached_property
    def _parameters(self) -> dict[int, torch.Tensor]:
        return dict(numbered(self._contents))

    @cached_property
    def _objects(self) -> dict[int, Any]:
        return {content.number: meant_by(thing) for thing, content in self._contents.objects()}

    def value(self, described: list[Any], own: Any) -> Any:
        """The value.

        Args:
            described: as ``ValueWriter`` gave it.
            own: what is in its place here.
        """
        kind = described[0]
        what: Any = described[1] if len(described) > 1 else None
        if kind == "v":
            return own if type(own) is type(what) and own == what else what
        if kind == "p":
            return self._parameters.get(what, own)
        if kind == "o":
            return self._objects.get(what, own)
        if kind == "t":
            fits = not isinstance(own, torch.Tensor) or self.may_write(own, what)
            return written(own if fits else None, self.tensors[what])
        if kind == "s":
            return sparse_parts.assemble(described[2], [self.tensors[number] for number in what])
        if kind == "n":
            array = self.tensors[what].numpy()
            if self._writes_arrays and _fits(own, array) and described[2]:
                own[...] = array
                return own
            return array.copy() if described[2] else array[()]
        if kind == "r":
            state = own if isinstance(own, random.Random) else random.Random()
            state.setstate((what[0], tuple(what[1]), what[2]))
            return state
        return own if kind == "k" else self._container(described, own)

    def _container(self, described: list[Any], own: Any) -> Any:
        kind, parts = described[:2]
        if kind == "d":
            return self._dict(parts, own if isinstance(own, dict) else _EMPTY.get(described[2], dict)())
        if kind == "e":
            made = {self.value(part, None) for part in parts}
            return own if own == made else made
        if kind == "b":
            return self._of_own_class(parts, described[2], own)
        now = self._entries(parts, own)
        if kind == "u":
            return own if isinstance(own, tuple) and _same(own, now) else _tuple_like(own, now)
        made_of = deque if len(described) > 2 else list
        if type(own) is not made_of:
            return deque(now, described[3]) if made_of is deque else now
        own.clear()
        own.extend(now)
        return own

    def _entries(self, parts: list[Any], own: Any) -> list[Any]:
        before = list(own) if isinstance(own, list | tuple | deque) else []
        before += [MISSING] * (len(parts) - len(before))
        return [v for part, b in zip(parts, before, strict=False) if (v := self.value(part, b)) is not MISSING]

    def _of_own_class(self, parts: list[Any], attributes: list[Any], own: Any) -> Any:
        """A list, a set or a deque of a class of the program's, which can be filled but not made here."""
        if not copies.has_attributes_beside(own):
            warn_once(
                "elastic list of a class of its own",
                "A replica came to this worker with a list, a set or a deque of a class of the program's own, and this "
                "worker has none in its place: its entries are lost. Make it before the first step, or use a list of "
                "Python's (docs/elastic.md).",
            )
            return own
        now, base = self._entries(parts, own), copies.base_of(own)
        self.value(attributes, vars(own))
        base.clear(own)
        (base.update if base is set else base.extend)(own, now)
        return own

    def _dict(self, parts: list[Any], target: dict[Any, Any]) -> dict[Any, Any]:
        now: dict[Any, Any] = {}
        for key, part in parts:
            if key == _KEEP:
                continue
            name = self.value(key, None)
            value = self.value(part, target.get(name, MISSING))
            if value is not MISSING:
                now[name] = value
        kept = {k: v for k, v in target.items() if k not in now and not _is_sent_as_key(k)}
        target.clear()
        target.update({**now, **kept})
        return target


def _fits(own: Any, array: np.ndarray) -> bool:
    return type(own) is np.ndarray and own.shape == array.shape and own.dtype == array.dtype and own.flags.writeable


def written(before: Any, value: Any) -> Any:
    """A value, in the tensor that is there if it fits; one of a graph belongs to whoever made it."""
    if not isinstance(value, torch.Tensor):
        return value
    fits = type(before) is torch.Tensor and before.shape == value.shape and before.dtype == value.dtype
    if fits and before.stride() == value.stride() and not (before.requires_grad or before.is_inference()):
        with torch.no_grad():
            before.copy_(value)
        return before
    return value.clone()


def _is_sent_as_key(key: Any) -> bool:
    return type(key) in JSON_TYPES or isinstance(key, tuple | torch.Tensor | np.generic)


def _same(own: tuple[Any, ...], now: list[Any]) -> bool:
    return len(own) == len(now) and all(a is b for a, b in zip(own, now, strict=True))


def _tuple_like(own: Any, now: list[Any]) -> Any:
    return type(own)(*now) if hasattr(own, "_fields") else tuple(now)
