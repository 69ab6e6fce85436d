"""All that a worker holds between two steps, as numbers and tensors, and putting it into the same objects elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.elastic.replica_state import has_own_value, is_content
from tfstyle_dist.elastic.values import MISSING, ValueReader, ValueWriter
from tfstyle_dist.variables.contents import ReplicaContents
from tfstyle_dist.variables.record import Record, raw

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
        writer = ValueWriter(self._contents)
        tensors = writer.tensors
        with raw(), torch.no_grad():
            parameters = [
                [writer.put(p.detach()), p.requires_grad, None if p.grad is None else writer.value(p.grad.detach())]
                for p in self._contents.parameters()
            ]
            equal = len(tensors)
            optimizers = [e for e in self._contents.objects() if isinstance(e[0], torch.optim.Optimizer)]
            others = [e for e in self._contents.objects() if not isinstance(e[0], torch.optim.Optimizer)]
            objects = [_object(writer, thing, content.number) for thing, content in optimizers]
            equal = len(tensors)
            objects += [_object(writer, thing, content.number) for thing, content in others]
            variables = [_variable(writer, record) for record in self._variables()]
            generators = [
                [
                    writer.put(generator.get_state() if replica == self._contents.first else state)
                    for replica, state in enumerate(states)
                ]
                for generator, states in self._contents.generators.living()
            ]
        sent = {"parameters": parameters, "objects": objects, "variables": variables, "generators": generators}
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
        reader = ValueReader(self._contents, tensors)
        with raw(), torch.no_grad():
            for parameter, (number, trains, grad) in zip(self._contents.parameters(), sent["parameters"], strict=True):
                parameter.requires_grad_(trains)
                parameter.detach().copy_(tensors[number])
                parameter.grad = None if grad is None else reader.value(grad, None)
            for number, _, attributes in sent["objects"]:
                if number in found:
                    _fill(found[number], attributes, reader)
            records = {record.number: record for record in self._variables()}
            for number, copies in sent["variables"]:
                record = records[number]
                for replica, component in enumerate(record.components):
                    component.copy_(tensors[copies[replica if len(copies) > 1 else 0]])
                record.changes += 1
            for (generator, own), states in zip(self._contents.generators.living(), sent["generators"], strict=False):
                own[:] = [tensors[state].clone() for state in states]
                generator.set_state(own[self._contents.first])


def _object(writer: ValueWriter, thing: Any, number: int) -> list[Any]:
    attributes = {name: writer.value(v) for name, v in thing.__dict__.items() if is_content(thing, name)}
    return [number, type(thing).__name__, attributes]


def _variable(writer: ValueWriter, record: Record) -> list[Any]:
    copies = record.components if has_own_value(record) else record.components[:1]
    return [record.number, [writer.put(copy.detach()) for copy in copies]]


def _fill(thing: Any, attributes: dict[str, Any], reader: ValueReader) -> None:
    for name, described in attributes.items():
        before = thing.__dict__.get(name, MISSING)
        value = reader.value(described, before)
        if value is not MISSING and value is not before:
            thing.__dict__[name] = value


def _listed(names: dict[int, str]) -> str:
    return ", ".join(names[number] for number in sorted(names)) or "none"
