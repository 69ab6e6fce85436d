"""What a step may write to, as it was before the step; and putting it back, into the same objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.elastic.state.held_values import HeldValues
from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.content.object_content import ObjectContent
from tfstyle_dist.variables.content.parameter_marks import Hooks, hooks_of
from tfstyle_dist.variables.content.stand_ins import set_attributes
from tfstyle_dist.variables.record import Record, raw


class Undo:
    """The committed state of this worker's first replica; the other replicas' is made from it.

    Memory for one copy of the parameters, their gradients, the optimizers' state, the buffers and the variables is kept
    from step to step.

    Args:
        contents: what the objects of the program hold.
        variables: gives the records of the strategy's variables.
    """

    def __init__(self, contents: ReplicaContents, variables: Callable[[], Iterable[Record]]) -> None:
        self._contents, self._variables = contents, variables
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor and memory for its copy
        self._held: HeldValues | None = None
        self._common: HeldValues | None = None
        self._clear()

    def _clear(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._dicts: list[tuple[ObjectContent, dict[str, Any]]] = []
        self._parameters: list[tuple[torch.Tensor, torch.Tensor | None, bool, Hooks]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        self._others: list[tuple[random.Random, Any]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._late: list[HeldValues] = []

    # ---- keeping ----------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Remembers everything; called in cross-replica context."""
        self._clear()
        parameters = self._contents.parameters()
        for parameter in parameters:
            grad = parameter.grad
            self._parameters.append((parameter, grad, parameter.requires_grad, hooks_of(parameter)))
            self._tensors.append(parameter)
            if grad is not None:
                self._tensors.append(grad)
        self._dicts = [(content, self._attributes(thing, content)) for thing, content in self._contents.objects()]
        roots = [attributes for _, attributes in self._dicts] + [parameter.__dict__ for parameter in parameters]
        if self._held is None or not self._held.same(roots, parameters):
            self._held = HeldValues(roots, parameters)
        # Apart, because a counter among these makes it another one in each step.
        common = [thing.__dict__ for _, thing in self._contents.common.living()] if self._contents.common else []
        if self._common is None or not self._common.same(common, parameters):
            self._common = HeldValues(common, parameters)
        for held in (self._held, self._common):
            self._tensors += held.tensors
            self._keep_others(held)
        for generator, states in self._contents.generators():
            self._generators.append((generator, generator.get_state(), states, list(states)))
        for record in self._variables():
            self._tensors += record.components
        self._copy()
        self._contents.on_take = self._keep_late
        if self._contents.common is not None:
            self._contents.common.on_add = lambda thing: self._keep_values_late(thing.__dict__)

    def _attributes(self, thing: Any, content: ObjectContent) -> dict[str, Any]:
        """Those of the first replica here."""
        if self._contents.active is None or self._contents.active == self._contents.first:
            return thing.__dict__  # type: ignore[no-any-return]
        return content.dicts[self._contents.first]

    def _keep_late(self, content: ObjectContent) -> None:
        """An object that was found during the step, before it was written to."""
        attributes = self._attributes(content.reference(), content)
        self._dicts.append((content, attributes))
        self._keep_values_late(attributes)

    def _keep_values_late(self, attributes: dict[str, Any]) -> None:
        late = HeldValues([attributes], self._contents.parameters())
        self._late.append(late)
        self._tensors += late.tensors
        self._keep_others(late)
        for tensor in late.tensors:
            self._kept.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def _keep_others(self, held: HeldValues) -> None:
        self._others += [(other, other.getstate()) for other in held.randoms]
        self._arrays += [(array, array.copy()) for array in held.arrays]

    def _copy(self) -> None:
        """Copies the tensors, into the memory of the last time where it fits."""
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        old: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        with torch.no_grad(), raw():
            for tensor in self._tensors:
                known = self._kept.get(id(tensor))
                own = tensor.detach()
                if known is None or known[0] is not tensor or not _fits(known[1], own):
                    kept[id(tensor)] = (tensor, own.clone())
                    continue
                kept[id(tensor)] = known
                old[0].append(known[1])
                old[1].append(own)
            if old[0]:
                torch_internals.foreach_copy_(*old)
        self._kept = kept

    # ---- putting back -----------------------------------------------------------------------------------------

    def done(self) -> None:
        """The step is at its end: what is found from now on is not kept."""
        self._contents.on_take = None
        if self._contents.common is not None:
            self._contents.common.on_add = None

    def restore(self) -> None:
        """Puts everything back; called in cross-replica context. The other replicas get it when they run again."""
        self.done()
        for held in (self._held, self._common, *self._late):
            if held is not None:
                held.put_back()
        for content, now in self._dicts:
            thing = content.reference()
            if thing is not None:
                set_attributes(thing, now)
        with torch.no_grad(), raw():
            for parameter, grad, trains, hooks in self._parameters:
                parameter.requires_grad_(trains)
                parameter.grad = grad
                for name, entries in zip(torch_internals.HOOKS, hooks or ((), ()), strict=True):
                    if (box := getattr(parameter, name)) is not None:  # the same dict: handles that remove refer to it
                        box.clear()
                        box.update(entries)
            for tensor in self._tensors:
                _put(tensor, self._kept[id(tensor)][1])
        for generator, state, states, was_states in self._generators:
            generator.set_state(state)
            states[:] = was_states
        for other, state in self._others:
            other.setstate(state)
        for array, was in self._arrays:
            array[...] = was
        for record in self._variables():
            record.changes += 1
        self._contents.distrust()


def _fits(memory: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        memory.shape == tensor.shape
        and memory.dtype == tensor.dtype
        and memory.layout is torch.strided
        and tensor.layout is torch.strided
        and memory.device == tensor.device
    )


def _put(tensor: torch.Tensor, was: torch.Tensor) -> None:
    own = tensor.detach()
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(was)
    elif _fits(was, own):
        own.copy_(was)
    else:  # it was resized, or is sparse
        tensor.data = was.clone()
