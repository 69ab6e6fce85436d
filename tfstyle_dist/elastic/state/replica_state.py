"""What differs from replica to replica between steps: it is sent with the vote, so that every worker has all of it.

Of modules, and of objects that hold tensors, that are the buffers and the attributes that a step changed; of variables
the copies of ON_READ ones and of those without aggregation; of generators that the program made the state. Parameters
and optimizers are equal on all replicas after a step, and are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.elastic.state.before_images import BeforeImage, marks
from tfstyle_dist.elastic.state.serialized_values import MISSING, ValueReader, ValueWriter
from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.content.copies import Copier, copied
from tfstyle_dist.variables.content.stand_ins import class_of, set_attributes
from tfstyle_dist.variables.content.state_objects import BOXES, MOST_LOOKED_AT, parts_of, stays
from tfstyle_dist.variables.record import Record, raw

_EQUAL_EVERYWHERE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
MACHINERY = frozenset(
    name for name in torch.nn.Module().__dict__ if name not in ("training", "_buffers", "_non_persistent_buffers_set")
)
"""Attributes of modules that are the same on all workers."""
_NO_ATTRIBUTES = MACHINERY | {"_buffers"}
_OWN = "_tfstyle"  # what this package keeps with objects begins so
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
        self._before: dict[int, dict[Place, BeforeImage]] = {}
        self._registered_before: dict[int, list[tuple[int, str, Any]]] = {}
        self._known = 0

    # ---- of this worker's replicas ----------------------------------------------------------------------------

    def mark(self, held: Sequence[int]) -> None:
        """A step begins."""
        writer = ValueWriter(self._contents)
        before, self._before = self._before, {}
        self._known = self._contents.taken
        self._registered_before = {replica: self._registered(replica) for replica in held}
        for replica in held:
            old, now = before.get(replica, {}), self._before.setdefault(replica, {})
            for place, value in self._values(replica):
                image = old.get(place)
                now[place] = BeforeImage(writer, value) if image is None else image.renewed(writer, value)

    def changed(self, replica: int) -> Known:
        """What the step has changed for a replica of this worker, to be sent; called when all have finished.

        Raises:
            NotImplementedError: an attribute is a module, an optimizer or the like that the step has made.
        """
        types, writer, found = self._types(), ValueWriter(self._contents), []
        self._check_registered(replica, types, writer)
        before = dict(self._before.get(replica, {}))
        for place, value in self._values(replica):
            was = before.pop(place, None)
            differs = was is None or was.differs(writer, value)
            if differs:
                found.append(_entry(place, value, writer, types))
            if differs or was is None or was.left_out != marks(writer.left_out):
                self._check_known(place, value, types, writer)
            if was is None or was.left_out != marks(writer.left_out):
                _warn_not_sent(_type_at(place, types), place[2], writer.left_out)
            if was is not None and was.written_arrays():
                _warn_of_array(_type_at(place, types), place[2])
        found += [_entry(place, _GONE, writer, types) for place in before if _is_there(place, types)]
        return found

    def _check_known(self, place: Place, value: Any, types: dict[int, str], writer: ValueWriter) -> None:
        """Refuses objects that each replica made for itself, which nobody else has; all of a new object is new."""
        if place[0] == "a" and place[1] < self._known:
            for part in filter(stays, _parts(value)):
                if self._is_new(part, writer):
                    raise NotImplementedError(_refused(type(part).__name__, place[2], types[place[1]]))

    def _is_new(self, thing: Any, writer: ValueWriter) -> bool:
        number = writer.number_of(thing)
        return number is None or number >= self._known

    def _registered(self, replica: int) -> list[tuple[int, str, Any]]:
        """The modules and parameters of modules: of which module by number, under which name."""
        return [
            (content.number, name, part)
            for thing, content in self._contents.objects()
            if isinstance(thing, torch.nn.Module) and content.number < self._known
            for box in torch_internals.registered_among(self._contents.attributes(thing, replica))
            for name, part in box.items()
        ]

    def _check_registered(self, replica: int, types: dict[int, str], writer: ValueWriter) -> None:
        """As ``_check_known``, for what modules keep apart from their attributes."""
        now, before = self._registered(replica), self._registered_before[replica]
        if len(now) == len(before) and all(one[2] is other[2] for one, other in zip(now, before, strict=True)):
            return
        known = {id(part) for _, _, part in before}
        for number, name, part in now:
            made = id(part) not in known and (not isinstance(part, torch.nn.Module) or self._is_new(part, writer))
            if made and part is not None:
                raise NotImplementedError(_refused(type(part).__name__, name, types[number]))

    def now(self, replica: int, places: Iterable[Place]) -> Known:
        """What a replica has at these places now."""
        if not (places := list(places)):
            return []
        values, types, writer = dict(self._values(replica)), self._types(), ValueWriter(self._contents)
        wanted = [place for place in places if place in values or _is_there(place, types)]
        entries = [_entry(place, values.get(place, _GONE), writer, types) for place in wanted]
        return [(state, [tensor.clone() for tensor in tensors]) for state, tensors in entries]

    def _types(self) -> dict[int, str]:
        return {content.number: class_of(thing).__name__ for thing, content in self._contents.objects()}

    def _values(self, replica: int) -> Iterator[tuple[Place, Any]]:
        for thing, content in self._contents.objects():
            if isinstance(thing, _EQUAL_EVERYWHERE):
                continue
            now, number = self._contents.attributes(thing, replica), content.number
            hidden: frozenset[str] = frozenset()
            if isinstance(thing, torch.nn.Module):
                hidden = _NO_ATTRIBUTES
                for name, value in list(now.get("_buffers", {}).items()):
                    if value is not None:
                        yield ("b", number, name), value
            for name in [n for n in now if n not in hidden and not n.startswith(_OWN)]:
                yield ("a", number, name), now[name]
        for number, (generator, states) in enumerate(self._contents.generators()):
            yield ("g", number, ""), generator.get_state() if replica == self._contents.first else states[replica]
        for record in self._variables():
            if has_own_value(record):
                with raw():
                    yield ("v", record.number, ""), record.components[replica].detach()

    # ---- of replicas of other workers -------------------------------------------------------------------------

    def install(self, replica: int, known: Known) -> None:
        """Gives a replica what it has of its own.

        Args:
            replica: any replica; its content must not be the one that has the turn.
            known: as ``changed`` gave it.
        """
        objects = {content.number: thing for thing, content in self._contents.objects()}
        records, types = {record.number: record for record in self._variables()}, self._types()
        reader = ValueReader(self._contents)
        for (kind, number, name, what, of, _), tensors in known:
            here = _type_at((kind, number, name), types)
            if kind in ("a", "b") and number not in types and number < self._contents.taken:
                continue  # it is gone: the garbage collector comes when it likes, on each worker
            if of != here:
                raise CollectiveMismatchError(
                    f"The workers found different objects in the step: object {number} is {of!r} on one worker and "
                    f"{here!r} here. Build the same objects in the same order on every worker. Objects of the data "
                    "in which the step keeps a tensor, such as the nodes of a tree, count as well: let it delete the "
                    "tensor before it ends (del node.state)."
                )
            reader.tensors = tensors
            if kind == "v":
                if number in records:
                    with torch.no_grad(), raw():
                        records[number].components[replica].copy_(tensors[0])
            elif kind == "g":
                self._set_generator(number, replica, tensors[0])
            elif number in objects:
                self._put(objects[number], kind, name, what, replica, reader)

    def _set_generator(self, number: int, replica: int, state: torch.Tensor) -> None:
        generator, states = self._contents.generators()[number]
        states[replica] = state.clone()
        if replica == self._contents.first:
            generator.set_state(state)

    def _put(self, thing: Any, kind: str, name: str, what: Any, replica: int, reader: ValueReader) -> None:
        attributes, shown = self._contents.attributes(thing, replica), thing.__dict__
        own, other = map(torch_internals.buffers_among, (attributes, shown)) if kind == "b" else (attributes, shown)
        if what is None:
            own.pop(name, None)
        else:
            like = own[name] if name in own else _copied(other.get(name, MISSING))
            value = reader.value(what, like)
            if value is not MISSING:
                own[name] = value
        if attributes is shown:
            set_attributes(thing, attributes)


def _entry(place: Place, value: Any, writer: ValueWriter, types: dict[int, str]) -> tuple[Any, list[torch.Tensor]]:
    """A value as it is sent; of one that is gone ``None``."""
    described, tensors, _ = (None, [], []) if value is _GONE else writer.describe(value)
    return [*place, described, _type_at(place, types), len(tensors)], tensors


def place_of(state: Any) -> Place:
    """Where a value belongs that was sent."""
    return tuple(state[:3])


def count_tensors(state: Any) -> int:
    """How many tensors belong to it."""
    return int(state[5])


def _parts(value: Any, depth: int = 4) -> Iterator[Any]:
    """What is in containers, also in containers within them; of anything else the value."""
    if not isinstance(value, BOXES):
        yield value
    elif depth:
        for part in parts_of(value, MOST_LOOKED_AT):
            yield from _parts(part, depth - 1)


def _refused(made: str, name: str, kind: str) -> str:
    return (
        f"The step made a {made} and keeps it in the attribute {name!r} of {kind}. In an elastic job replicas move "
        "from worker to worker, and what a step made is on one worker only. Make it in strategy.scope() before the "
        "first step (if it is older, and no step has used it yet: strategy.experimental_adopt(it)), or do not keep it."
    )


def _copied(value: Any) -> Any:
    return Copier(lambda _: False, lambda tensor: copied(tensor, tensor.device))(value)


def _type_at(place: Place, types: dict[int, str]) -> str:
    """What kind of object it is; empty for what is no object."""
    return types.get(place[1], "NoneType") if place[0] in ("a", "b") else ""


def _is_there(place: Place, types: dict[int, str]) -> bool:
    """Whether the object of an attribute is; Variables and generators have numbers of their own."""
    return place[0] in ("a", "b") and place[1] in types


def _warn_not_sent(kind: str, name: str, values: Iterable[Any]) -> None:
    strange = sorted({type(value).__name__ for value in values})
    if not strange:
        return
    warn_once(
        f"elastic attribute {kind}.{name} not sent",
        f"The attribute {name!r} of {kind} holds {', '.join(strange)}, which a step has set or written to, and an "
        "elastic job sends tensors, numbers, text, and lists, dicts, sets and deques of them. A replica that moves to "
        "another worker begins with that worker's value.",
    )


def _warn_of_array(kind: str, name: str) -> None:
    warn_once(
        f"elastic attribute {kind}.{name} array",
        f"A step wrote to elements of a numpy array in the attribute {name!r} of {kind}. The replicas that a worker "
        "holds have it in common, so what is in it depends on who holds which replica, and an elastic job moves "
        "replicas. Keep it in a tensor (register_buffer), or set the attribute to a new array: self.x = self.x + 1.",
    )


def is_content(thing: Any, name: str) -> bool:
    """Whether an attribute is the program's, and not of the machinery of modules or of this package."""
    return not name.startswith(_OWN) and not (isinstance(thing, torch.nn.Module) and name in MACHINERY)


def has_own_value(record: Record) -> bool:
    """Whether a variable differs from replica to replica."""
    return record.synchronization is VariableSynchronization.ON_READ or record.aggregation is VariableAggregation.NONE
