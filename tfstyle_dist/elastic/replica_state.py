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
from tfstyle_dist.elastic.leaves import Reader, describe
from tfstyle_dist.variables.contents import ReplicaContents
from tfstyle_dist.variables.record import Record, raw

_EQUAL_EVERYWHERE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_MACHINERY = frozenset(
    name for name in torch.nn.Module().__dict__ if name not in ("training", "_buffers", "_non_persistent_buffers_set")
)
_SENT = (torch.Tensor, bool, int, float, str, type(None))
_MOST_LEAVES = 256
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
        for place, value in self._values(replica):
            leaves, _ = nest.flatten(value)
            if _is_same(self._before.get((replica, place), ()), leaves) and leaves:
                continue
            if len(leaves) > _MOST_LEAVES or not all(type(v) in _SENT for v in leaves):
                continue
            what, sent = describe(leaves)
            described.append([*place, what, self._type_of(place)])
            tensors += sent
        return described, tensors

    def _type_of(self, place: Place) -> str:
        if place[0] not in ("a", "b"):
            return ""
        found = next((thing for thing, content in self._contents.objects() if content.number == place[1]), None)
        return type(found).__name__

    def _values(self, replica: int) -> Iterator[tuple[Place, Any]]:
        for thing, content in self._contents.objects():
            if isinstance(thing, _EQUAL_EVERYWHERE):
                continue
            now = self._contents.attributes(thing, replica)
            for name, value in list(now.get("_buffers", {}).items()) if isinstance(thing, torch.nn.Module) else ():
                if value is not None:
                    yield ("b", content.number, name), value
            for name, value in list(now.items()):
                if isinstance(thing, torch.nn.Module) and (name in _MACHINERY or name == "_buffers"):
                    continue
                if type(value) in _SENT or type(value) in (list, tuple, dict):
                    yield ("a", content.number, name), value
        for number, (generator, states) in enumerate(self._contents.generators()):
            yield ("g", number, ""), generator.get_state() if replica == self._contents.first else states[replica]
        for record in self._variables():
            if _is_own(record):
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
        records = {record.number: record for record in self._variables()}
        for kind, number, name, what, of in described:
            here = self._type_of((kind, number, name))
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
        generator, states = self._contents.generators()[number]
        states[replica] = state.clone()
        if replica == self._contents.first:
            generator.set_state(state)

    def _put(self, thing: Any, kind: str, name: str, leaves: list[Any], replica: int) -> None:
        own = self._contents.attributes(thing, replica)
        if kind == "b":
            buffers = torch_internals.buffers_among(own)
            buffers[name] = _written(buffers.get(name), leaves[0])
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
        own[name] = nest.unflatten([_written(b, v) for b, v in zip(before, leaves, strict=True)], spec)


def _image(value: Any) -> tuple[Any, ...]:
    """The leaves of a value as they are now; a module's own kernels may write to buffers without a version."""
    leaves, _ = nest.flatten(value)
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
    return torch.equal(_bytes(before), _bytes(now.detach()))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.reshape(-1)


def _written(before: Any, value: Any) -> Any:
    """The value, in the tensor that is there if it fits."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(before) is torch.Tensor and before.shape == value.shape and before.dtype == value.dtype:
        with torch.no_grad():
            before.copy_(value)
        return before
    return value.clone()


def _is_own(record: Record) -> bool:
    return record.synchronization is VariableSynchronization.ON_READ or record.aggregation is VariableAggregation.NONE
