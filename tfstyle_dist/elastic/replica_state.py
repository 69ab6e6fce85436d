"""What differs from replica to replica between steps: it is sent with the vote, so that every worker has all of it.

Of modules, and of objects that hold tensors, that are the buffers and the attributes that a step changed; of variables
the copies of ON_READ ones and of those without aggregation; of generators that the program made the state. Parameters
and optimizers are equal on all replicas after a step, and are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.core import nest, torch_internals
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.elastic.leaves import Reader, describe
from tfstyle_dist.variables.contents import ReplicaContents
from tfstyle_dist.variables.record import Record, raw

_EQUAL_EVERYWHERE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
MACHINERY = frozenset(
    name for name in torch.nn.Module().__dict__ if name not in ("training", "_buffers", "_non_persistent_buffers_set")
)
"""Attributes of modules that are the same on all workers."""
_SENT = (torch.Tensor, bool, int, float, str, type(None))
_MOST_LEAVES = 256
_GONE = object()
Known = list[tuple[Any, list[torch.Tensor]]]
"""Values that a replica has of its own: descriptions as ``ReplicaStates.changed`` makes them, and their tensors."""
Place = tuple[str, int, str]  # of which kind, the number of the object or record, the name of the attribute


class ReplicaStates:
    """What each replica has of its own, as of the last committed step.

    Args:
        contents: what the objects of the program hold.
        variables: gives the records of the strategy's variables.
    """

    def __init__(self, contents: ReplicaContents, variables: Callable[[], Iterable[Record]]) -> None:
        self._contents, self._variables = contents, variables
        self._before: dict[tuple[int, Place], tuple[Any, ...]] = {}

    # ---- of this worker's replicas ----------------------------------------------------------------------------

    def mark(self, held: Sequence[int]) -> None:
        """A step begins."""
        self._before = {(r, place): _image(value) for r in held for place, value in self._values(r)}

    def changed(self, replica: int) -> tuple[list[Any], list[torch.Tensor]]:
        """What the step has changed for a replica of this worker, to be sent; called when all have finished."""
        described, tensors = [], []
        types = self._types()
        for place, value in self._values(replica):
            leaves, before = _leaves(value), self._before.get((replica, place))
            if len(leaves) > _MOST_LEAVES or (before is not None and _is_same(before, leaves)):
                continue
            if strange := {type(leaf).__name__ for leaf in leaves if type(leaf) not in _SENT}:
                _warn_not_sent(_type_at(place, types), place[2], strange)
                continue
            what, sent = describe(leaves)
            described.append([*place, what, _type_at(place, types)])
            tensors += sent
        return described, tensors

    def now(self, replica: int, known: Known) -> Known:
        """The same values of a replica as they are now; those that are gone or cannot be sent now are left out."""
        values, found = dict(self._values(replica)), []
        for (kind, number, name, _, of), _ in known:
            leaves = _leaves(values.get((kind, number, name), _GONE))
            if len(leaves) <= _MOST_LEAVES and all(type(leaf) in _SENT for leaf in leaves):
                what, tensors = describe(leaves)
                found.append(([kind, number, name, what, of], [tensor.clone() for tensor in tensors]))
        return found

    def _types(self) -> dict[int, str]:
        return {content.number: type(thing).__name__ for thing, content in self._contents.objects()}

    def _values(self, replica: int) -> Iterator[tuple[Place, Any]]:
        for thing, content in self._contents.objects():
            if isinstance(thing, _EQUAL_EVERYWHERE):
                continue
            now = self._contents.attributes(thing, replica)
            for name, value in list(now.get("_buffers", {}).items()) if isinstance(thing, torch.nn.Module) else ():
                if value is not None:
                    yield ("b", content.number, name), value
            for name, value in list(now.items()):
                if isinstance(thing, torch.nn.Module) and (name in MACHINERY or name == "_buffers"):
                    continue
                if type(value) in _SENT or type(value) in (list, tuple, dict):
                    yield ("a", content.number, name), value
        for number, (generator, states) in enumerate(self._contents.generators.living()):
            yield ("g", number, ""), generator.get_state() if replica == self._contents.first else states[replica]
        for record in self._variables():
            if has_own_value(record):
                with raw():
                    yield ("v", record.number, ""), record.components[replica].detach()

    # ---- of replicas of other workers -------------------------------------------------------------------------

    def install(self, replica: int, described: Sequence[Any], reader: Reader) -> None:
        """Gives a replica what it has of its own.

        Args:
            replica: any replica; its content must not be the one that has the turn.
            described: as ``changed`` gave it.
            reader: of the tensors.
        """
        objects = {content.number: thing for thing, content in self._contents.objects()}
        records, types = {record.number: record for record in self._variables()}, self._types()
        for kind, number, name, what, of in described:
            here = _type_at((kind, number, name), types)
            if of != here:
                raise CollectiveMismatchError(
                    f"The workers found different objects in the step: object {number} is {of!r} on one worker and "
                    f"{here!r} here. Build the same objects in the same order on every worker."
                )
            values = reader.leaves(what, [None] * len(what), f"state {name!r} of a replica")
            if kind == "v":
                with torch.no_grad(), raw():
                    records[number].components[replica].copy_(values[0])
            elif kind == "g":
                self._set_generator(number, replica, values[0])
            elif number in objects:
                self._put(objects[number], kind, name, values, replica)

    def _set_generator(self, number: int, replica: int, state: torch.Tensor) -> None:
        generator, states = self._contents.generators.living()[number]
        states[replica] = state.clone()
        if replica == self._contents.first:
            generator.set_state(state)

    def _put(self, thing: Any, kind: str, name: str, leaves: list[Any], replica: int) -> None:
        own = self._contents.attributes(thing, replica)
        if kind == "b":
            buffers = torch_internals.buffers_among(own)
            buffers[name] = written(buffers.get(name), leaves[0])
            return
        like = own.get(name, thing.__dict__.get(name))
        _, spec = nest.flatten(like)
        if spec.num_leaves != len(leaves):
            warn_once(
                f"elastic attribute {type(thing).__name__}.{name}",
                f"The attribute {name!r} of {type(thing).__name__} has another structure on another replica; a replica "
                "that moves to another worker begins with that worker's value.",
            )
            return
        before, _ = nest.flatten(like)
        own[name] = nest.unflatten([written(b, v) for b, v in zip(before, leaves, strict=True)], spec)


def _type_at(place: Place, types: dict[int, str]) -> str:
    """What kind of object it is; empty for what is no object."""
    return types.get(place[1], "NoneType") if place[0] in ("a", "b") else ""


def _leaves(value: Any) -> Sequence[Any]:
    return nest.flatten(value)[0] if type(value) in (list, tuple, dict) else (value,)


def _warn_not_sent(kind: str, name: str, strange: Iterable[str]) -> None:
    warn_once(
        f"elastic attribute {kind}.{name} not sent",
        f"The attribute {name!r} of {kind} holds {', '.join(sorted(strange))}, and an elastic job sends tensors, "
        "numbers and text. A replica that moves to another worker begins with that worker's value.",
    )


def _image(value: Any) -> tuple[Any, ...]:
    """The leaves of a value as they are now; a module's own kernels may write to buffers without a version."""
    leaves = _leaves(value)
    if len(leaves) > _MOST_LEAVES:
        return ()
    return tuple(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


def _is_same(image: tuple[Any, ...], leaves: Sequence[Any]) -> bool:
    return len(image) == len(leaves) and all(map(_is_same_leaf, image, leaves))


def _is_same_leaf(before: Any, now: Any) -> bool:
    if not isinstance(now, torch.Tensor) or not isinstance(before, torch.Tensor):
        return type(before) is type(now) and bool(before == now) if type(now) in _SENT else before is now
    if before.shape != now.shape or before.dtype != now.dtype or before.layout != now.layout:
        return False
    if now.layout is not torch.strided:
        return False
    return torch.equal(bytes_of(before), bytes_of(now))


def written(before: Any, value: Any) -> Any:
    """A value, in the tensor that is there if it fits."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(before) is torch.Tensor and before.shape == value.shape and before.dtype == value.dtype:
        with torch.no_grad():
            before.copy_(value)
        return before
    return value.clone()


def has_own_value(record: Record) -> bool:
    """Whether a variable differs from replica to replica."""
    return record.synchronization is VariableSynchronization.ON_READ or record.aggregation is VariableAggregation.NONE
