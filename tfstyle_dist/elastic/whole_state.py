"""All that a worker holds between two steps, as numbers and tensors, and putting it into the same objects elsewhere.

Both programs are the same, so what cannot be sent (functions, hooks, devices) is what the receiver has in its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.elastic.packets import check_can_be_sent
from tfstyle_dist.elastic.replica_state import MACHINERY, has_own_value, written
from tfstyle_dist.variables.contents import ReplicaContents
from tfstyle_dist.variables.copies import CONTAINERS, MOST_ENTRIES, PLAIN_TENSORS
from tfstyle_dist.variables.record import Record, raw

_VALUES = (bool, int, float, str, type(None))
_MOST_DEPTH = 20
_KEEP: list[Any] = ["k"]
_MISSING = object()
Sent = dict[str, Any]


class WholeState:
    """Describes and installs the content of the first replica of this worker, and the variables of all.

    Args:
        contents: what the objects of the program hold.
        variables: gives the records of the strategy's variables.
    """

    def __init__(self, contents: ReplicaContents, variables: Callable[[], Iterable[Record]]) -> None:
        self._contents, self._variables = contents, variables

    def describe(self) -> tuple[Sent, list[torch.Tensor], list[bool]]:
        """What is sent.

        Returns:
            A JSON-able description, the tensors that it names by number, and of each tensor whether it is the same on
            all workers.
        """
        tensors: list[torch.Tensor] = []
        writer = _Writer(self._contents, tensors)
        with raw(), torch.no_grad():
            parameters = [
                [_put(tensors, p.detach()), p.requires_grad, None if p.grad is None else writer.value(p.grad.detach())]
                for p in self._contents.parameters()
            ]
            equal = len(tensors)
            optimizers = [e for e in self._contents.objects() if isinstance(e[0], torch.optim.Optimizer)]
            others = [e for e in self._contents.objects() if not isinstance(e[0], torch.optim.Optimizer)]
            objects = [writer.object(thing, content.number) for thing, content in optimizers]
            equal = len(tensors)
            objects += [writer.object(thing, content.number) for thing, content in others]
            variables = [self._variable(record, tensors) for record in self._variables()]
            generators = [
                [
                    _put(tensors, generator.get_state() if replica == self._contents.first else state)
                    for replica, state in enumerate(states)
                ]
                for generator, states in self._contents.generators.living()
            ]
        sent = {"parameters": parameters, "objects": objects, "variables": variables, "generators": generators}
        return sent, tensors, [number < equal for number in range(len(tensors))]

    def _variable(self, record: Record, tensors: list[torch.Tensor]) -> list[Any]:
        copies = record.components if has_own_value(record) else record.components[:1]
        return [record.number, [_put(tensors, copy.detach()) for copy in copies]]

    def install(self, sent: Sent, tensors: Sequence[torch.Tensor], complete: bool) -> None:
        """Puts what another worker described into this one's objects; between runs.

        Args:
            sent: the description.
            tensors: its tensors.
            complete: whether all objects must be there.

        Raises:
            CollectiveMismatchError: the programs have different objects.
        """
        found = {content.number: thing for thing, content in self._contents.objects()}
        names = {number: type(thing).__name__ for number, thing in found.items()}
        theirs = {number: name for number, name, _ in sent["objects"]}
        different = [n for n in theirs if n in names and names[n] != theirs[n]]
        if different or (complete and names != theirs) or len(sent["parameters"]) != len(self._contents.parameters()):
            raise CollectiveMismatchError(
                "A worker that came back has other objects than the workers it joins: they have "
                f"{_listed(theirs)} and {len(sent['parameters'])} parameters, it has {_listed(names)} and "
                f"{len(self._contents.parameters())}. Build the same objects in the same order, and give every "
                "function that strategy.run gets, and every object with state that none of them names (a scheduler), "
                "to tfd.experimental.join(strategy, ...)."
            )
        reader = _Reader(self._contents, tensors)
        with raw(), torch.no_grad():
            for parameter, (number, trains, grad) in zip(self._contents.parameters(), sent["parameters"], strict=True):
                parameter.requires_grad_(trains)
                parameter.detach().copy_(tensors[number])
                parameter.grad = None if grad is None else reader.value(grad, None)
            for number, _, attributes in sent["objects"]:
                if number in found:
                    reader.into(found[number], attributes)
            records = {record.number: record for record in self._variables()}
            for number, copies in sent["variables"]:
                record = records[number]
                for replica, component in enumerate(record.components):
                    component.copy_(tensors[copies[replica if len(copies) > 1 else 0]])
                record.changes += 1
            for (generator, own), states in zip(self._contents.generators.living(), sent["generators"], strict=False):
                own[:] = [tensors[state].clone() for state in states]
                generator.set_state(own[self._contents.first])


class _Writer:
    """Describes values."""

    def __init__(self, contents: ReplicaContents, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._parameters = {id(p): number for number, p in enumerate(contents.parameters())}
        self._objects = {id(thing): content.number for thing, content in contents.objects()}

    def object(self, thing: Any, number: int) -> list[Any]:
        attributes = {name: self.value(v) for name, v in thing.__dict__.items() if _is_sent(thing, name)}
        return [number, type(thing).__name__, attributes]

    def value(self, value: Any, depth: int = 0) -> list[Any]:
        kind = type(value)
        if kind in _VALUES:
            return ["v", value]
        if id(value) in self._parameters:
            return ["p", self._parameters[id(value)]]
        if id(value) in self._objects:
            return ["o", self._objects[id(value)]]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
            return ["n", _put(self._tensors, torch.from_numpy(np.array(value))), isinstance(value, np.ndarray)]
        if isinstance(value, random.Random):
            return ["r", value.getstate()]
        if depth > _MOST_DEPTH or not (kind in CONTAINERS or isinstance(value, tuple)) or len(value) > MOST_ENTRIES:
            return _KEEP
        if isinstance(value, dict):
            return ["d", [[self.value(k, depth + 1), self.value(v, depth + 1)] for k, v in value.items()]]
        parts = [self.value(part, depth + 1) for part in (sorted(value, key=repr) if kind is set else value)]
        return ["u" if isinstance(value, tuple) else "e" if kind is set else "l", parts]

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if value.layout is torch.sparse_coo:
            whole = value.coalesce()
            parts = [_put(self._tensors, part) for part in (whole.indices(), whole.values())]
            return ["s", *parts, list(value.shape)]
        if type(value) not in PLAIN_TENSORS or value.requires_grad or value.layout is not torch.strided:
            return _KEEP
        return ["t", _put(self._tensors, value)]


class _Reader:
    """Makes values of descriptions, in the containers and tensors that are there where they fit."""

    def __init__(self, contents: ReplicaContents, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._parameters = contents.parameters()
        self._objects = {content.number: thing for thing, content in contents.objects()}

    def into(self, thing: Any, attributes: dict[str, Any]) -> None:
        for name, described in attributes.items():
            before = thing.__dict__.get(name, _MISSING)
            value = self.value(described, before)
            if value is not _MISSING and value is not before:
                thing.__dict__[name] = value

    def value(self, described: list[Any], own: Any) -> Any:
        kind = described[0]
        what: Any = described[1] if len(described) > 1 else None
        if kind == "v":
            return own if type(own) is type(what) and own == what else what
        if kind == "p":
            return self._parameters[what]
        if kind == "o":
            return self._objects.get(what, own)
        if kind == "t":
            return written(own, self._tensors[what])
        if kind == "s":
            return torch.sparse_coo_tensor(self._tensors[what], self._tensors[described[2]], described[3])
        if kind == "n":
            array = self._tensors[what].numpy().copy()
            return array if described[2] else array[()]
        if kind == "r":
            state = own if isinstance(own, random.Random) else random.Random()
            state.setstate((what[0], tuple(what[1]), what[2]))
            return state
        return own if kind == "k" else self._container(kind, what, own)

    def _container(self, kind: str, parts: list[Any], own: Any) -> Any:
        if kind == "d":
            return self._dict(parts, own)
        if kind == "e":
            made = {self.value(part, None) for part in parts}
            return own if own == made else made
        before = list(own) if isinstance(own, list | tuple) or type(own) in CONTAINERS else []
        before += [_MISSING] * (len(parts) - len(before))
        now = [v for part, b in zip(parts, before, strict=False) if (v := self.value(part, b)) is not _MISSING]
        if kind == "u":
            return own if isinstance(own, tuple) and _same(own, now) else _tuple_like(own, now)
        if type(own) not in CONTAINERS or isinstance(own, dict | set):
            return now
        own.clear()
        own.extend(now)
        return own

    def _dict(self, parts: list[Any], own: Any) -> dict[Any, Any]:
        target = own if isinstance(own, dict) else {}
        now: dict[Any, Any] = {}
        for key, part in parts:
            if key == _KEEP:
                continue
            name = self.value(key, None)
            value = self.value(part, target.get(name, _MISSING))
            if value is not _MISSING:
                now[name] = value
        kept = {k: v for k, v in target.items() if k not in now and not _can_be_sent(v)}
        target.clear()
        target.update({**now, **kept})
        return target


def _is_sent(thing: Any, name: str) -> bool:
    if name.startswith("_tfstyle"):
        return False
    return not isinstance(thing, torch.nn.Module) or name not in MACHINERY


def _can_be_sent(value: Any) -> bool:
    return type(value) in _VALUES or type(value) in PLAIN_TENSORS or type(value) in CONTAINERS


def _put(tensors: list[torch.Tensor], value: torch.Tensor) -> int:
    check_can_be_sent(value)
    tensors.append(value)
    return len(tensors) - 1


def _same(own: tuple[Any, ...], now: list[Any]) -> bool:
    return len(own) == len(now) and all(a is b for a, b in zip(own, now, strict=True))


def _tuple_like(own: Any, now: list[Any]) -> Any:
    return type(own)(*now) if hasattr(own, "_fields") else tuple(now)


def _listed(names: dict[int, str]) -> str:
    return ", ".join(names[number] for number in sorted(names)) or "none"
