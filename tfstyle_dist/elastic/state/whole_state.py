"""All that a worker holds between two steps, as numbers and tensors, and putting it into the same objects elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.elastic.state.replica_state import has_own_value, is_content
from tfstyle_dist.elastic.state.serialized_values import MISSING, ValueReader, ValueWriter, is_long, memories_among
from tfstyle_dist.elastic.state.tensor_numbers import TensorNumbers
from tfstyle_dist.variables.content.common_objects import HeldInCommon
from tfstyle_dist.variables.content.copies import MOST_ENTRIES
from tfstyle_dist.variables.content.stand_ins import class_of, set_attributes
from tfstyle_dist.variables.content.state_objects import BOXES
from tfstyle_dist.variables.record import Record, raw
from tfstyle_dist.variables.store import ParameterStore

Sent = dict[str, Any]


class WholeState:
    """Describes and installs the content of the first replica of this worker, and the variables of all.

    Args:
        store: what the strategy owns.
    """

    def __init__(self, store: ParameterStore) -> None:
        assert store.contents is not None
        self._store, self._contents = store, store.contents

    def _variables(self) -> Iterable[Record]:
        return self._store.records("variable")

    def describe(self) -> tuple[Sent, list[torch.Tensor], list[bool]]:
        """What is sent.

        Returns:
            A JSON-able description, the tensors that it names by number, and of each tensor whether it is the same on
            all workers.
        """
        writer, looker = ValueWriter(self._contents), ValueWriter(self._contents)
        tensors = writer.tensors
        with raw(), torch.no_grad():
            parameters = [
                [writer.put(p.detach()), p.requires_grad, None if p.grad is None else writer.value(p.grad.detach())]
                for p in self._contents.parameters()
            ]
            optimizers = [e for e in self._contents.objects() if isinstance(e[0], torch.optim.Optimizer)]
            others = [e for e in self._contents.objects() if not isinstance(e[0], torch.optim.Optimizer)]
            objects = [_object(writer, thing, content.number) for thing, content in optimizers]
            numbers = TensorNumbers(self._store)
            common = [_common(writer, thing, number, numbers) for number, thing in self._common_objects()]
            equal = len(tensors)
            objects += [_object(writer, thing, content.number) for thing, content in others]
            variables = [_variable(writer, record) for record in self._variables()]
            generators = [
                [
                    writer.put(generator.get_state() if replica == self._contents.first else state)
                    for replica, state in enumerate(states)
                ]
                for generator, states in self._contents.generators()
            ]
        sent = {
            "parameters": parameters,
            "objects": objects,
            "common": common,
            "variables": variables,
            "generators": generators,
            "memories": memories_among(tensors),
            "long": [[content.number, long] for thing, content in others if (long := _lengths(looker, thing))],
        }
        return sent, tensors, [number < equal for number in range(len(tensors))]

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
        names = {number: class_of(thing).__name__ for number, thing in found.items()}
        theirs = {number: name for number, name, _ in sent["objects"]}
        different = [n for n in theirs if n in names and names[n] != theirs[n]]
        # Optimizers that all replicas have in common.
        shared_here = dict(self._common_objects())
        shared = {number: type(thing).__name__ for number, thing in shared_here.items()}
        their_shared = {number: name for number, name, *_ in sent["common"]}
        different += [n for n in their_shared if n in shared and shared[n] != their_shared[n]]
        names_differ = names != theirs or shared != their_shared
        if different or (complete and names_differ) or len(sent["parameters"]) != len(self._contents.parameters()):
            raise CollectiveMismatchError(
                "A worker that came back has other objects than the workers it joins: they have "
                f"{_listed(theirs, their_shared)} and {len(sent['parameters'])} parameters, it has "
                f"{_listed(names, shared)} and {len(self._contents.parameters())}. Build the same objects in the same "
                "order, and give every function that strategy.run gets, and every object with state that none of them "
                "names (a scheduler), to tfd.experimental.join(strategy, ...)."
            )
        self._check_variables(sent)
        for number, theirs in sent["long"] if complete else ():
            here = _lengths(ValueWriter(self._contents), found[number]) if number in found else theirs
            _say_not_sent(found.get(number), theirs, here)
        reader = ValueReader(self._contents, tensors, writes_arrays=True, memories=sent["memories"])
        with raw(), torch.no_grad():
            for parameter, (number, trains, grad) in zip(self._contents.parameters(), sent["parameters"], strict=True):
                parameter.requires_grad_(trains)
                if reader.may_write(parameter.detach(), number):
                    parameter.detach().copy_(tensors[number])
                else:
                    parameter.data = tensors[number].clone()
                parameter.grad = None if grad is None else reader.value(grad, None)
            for number, _, attributes in sent["objects"]:
                if number in found:
                    _fill(found[number], attributes, reader)
            numbers = TensorNumbers(self._store)
            for number, _, attributes, entries in sent["common"]:
                if number in shared_here:
                    _fill_common(shared_here[number], attributes, entries, reader, numbers)
            records = {record.number: record for record in self._variables()}
            for number, copies in sent["variables"]:
                if (record := records.get(number)) is None:
                    continue  # it is gone: the garbage collector comes when it likes, on each worker
                for replica, component in enumerate(record.components):
                    component.copy_(tensors[copies[replica if len(copies) > 1 else 0]])
                record.changes += 1
            for (generator, own), states in zip(self._contents.generators(), sent["generators"], strict=False):
                own[:] = [tensors[state].clone() for state in states]
                generator.set_state(own[self._contents.first])

    def _check_variables(self, sent: Sent) -> None:
        """Raises CollectiveMismatchError for Variables that this worker has not made; some may be gone by now."""
        others = {record.number for record in self._store.records() if record.kind != "variable"}
        missing = [n for n, _ in sent["variables"] if n >= self._store.version or n in others]
        if missing:
            raise CollectiveMismatchError(
                f"A worker that came back has not made {len(missing)} of the {len(sent['variables'])} Variables that "
                "the workers it joins have. Make the same Variables in the same order on every worker, all of them "
                "before tfd.experimental.join(strategy), not in the loop."
            )

    def _common_objects(self) -> list[tuple[int, HeldInCommon]]:
        return [] if self._contents.common is None else self._contents.common.living()


def _object(writer: ValueWriter, thing: Any, number: int) -> list[Any]:
    attributes = {name: writer.value(v) for name, v in thing.__dict__.items() if is_content(thing, name)}
    return [number, class_of(thing).__name__, attributes]


def _lengths(writer: ValueWriter, thing: Any) -> dict[str, list[int]]:
    """The lengths of the containers that are too long to be sent, by attribute."""
    boxes = {n: box for n, box in thing.__dict__.items() if is_content(thing, n) and isinstance(box, BOXES)}
    found = {name: [len(part) for part in filter(is_long, writer.describe(box)[2])] for name, box in boxes.items()}
    return {name: lengths for name, lengths in found.items() if lengths}


def _say_not_sent(thing: Any, theirs: dict[str, list[int]], here: dict[str, list[int]]) -> None:
    for name in [name for name, lengths in theirs.items() if lengths != here.get(name)]:
        warn_once(
            f"elastic long {type(thing).__name__}.{name}",
            f"The attribute {name!r} of {type(thing).__name__} holds {theirs[name]} entries on the workers that this "
            f"one joins, and {here.get(name, 'fewer')} here. An elastic job sends at most {MOST_ENTRIES} entries of a "
            "list, dict, set or deque, so this worker goes on with its own. Keep many entries in tensors.",
        )


def _common(writer: ValueWriter, thing: HeldInCommon, number: int, numbers: TensorNumbers) -> list[Any]:
    attributes = {name: writer.value(value) for name, value in thing.kept().items() if is_content(thing, name)}
    entries = [[numbers.number(tensor), writer.value(kept)] for tensor, kept in thing.kept_by_tensor()]
    return [number, type(thing).__name__, attributes, entries]


def _fill_common(
    thing: HeldInCommon, attributes: dict[str, Any], entries: list[Any], reader: ValueReader, numbers: TensorNumbers
) -> None:
    _fill(thing, attributes, reader)
    before = {id(tensor): kept for tensor, kept in thing.kept_by_tensor()}
    # Of a variable that is gone here nothing is kept.
    now = [(tensor, kept) for number, kept in entries if (tensor := numbers.living(number)) is not None]
    thing.keep_by_tensor([(tensor, reader.value(kept, before.get(id(tensor), {}))) for tensor, kept in now])


def _variable(writer: ValueWriter, record: Record) -> list[Any]:
    copies = record.components if has_own_value(record) else record.components[:1]
    return [record.number, [writer.put(copy.detach()) for copy in copies]]


def _fill(thing: Any, attributes: dict[str, Any], reader: ValueReader) -> None:
    held = thing.__dict__
    for name, described in attributes.items():
        before = held.get(name, MISSING)
        value = reader.value(described, before)
        if value is not MISSING and value is not before:
            held[name] = value
    set_attributes(thing, held)


def _listed(*found: dict[int, str]) -> str:
    return ", ".join(names[number] for names in found for number in sorted(names)) or "none"
