"""Central storage whose replicas compute on other devices: what the first one did to parameters is seen outside too.

The values are those of the one copy. Gradients, ``requires_grad``, hooks and attributes are the replica's, as where the
replicas compute with the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.variables.content import parameter_attributes
from tfstyle_dist.variables.content.copies import copied
from tfstyle_dist.variables.content.parameter_marks import are_alike, attributes_of, hooks_of, memory_of, put_hooks


class HomeRow:
    """What the parameters of cross-replica context take over from those of the first replica."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[Any, ...]] = {}

    def lend(self, parameters: Iterable[torch.Tensor], vessels: Iterable[torch.Tensor]) -> None:
        """The first replica's parameters are as those of cross-replica context now.

        Raises:
            RuntimeError: gradients are parts of one tensor: on another device they could not be.
        """
        places = [place for p in parameters if p.grad is not None and (place := memory_of(p.grad))]
        if len(set(places)) < len(places):
            raise RuntimeError(
                "Gradients (p.grad) were given parts of one tensor. Under central storage whose replicas compute on "
                "other devices than the parameters are on, they get copies, and what is written to that tensor would "
                "not reach them. Give each gradient a tensor of its own, or use MirroredStrategy."
            )
        self._lent = {place: _marks(vessel) for place, vessel in enumerate(vessels)}

    def free(self, vessels: Iterable[torch.Tensor]) -> None:
        """Between runs compute devices keep values with a view alone."""
        with torch.no_grad():
            for vessel in vessels:
                if vessel.layout is not torch.strided or torch_internals.lie_alone(vessel):
                    vessel.data = vessel.data.new_empty(0)

    def take_back(
        self, parameters: Sequence[torch.Tensor], vessels: Sequence[torch.Tensor], places: Iterable[int]
    ) -> None:
        """What the replica has changed since then reaches the parameters.

        Args:
            parameters: with what cross-replica context sees.
            vessels: what keeps the first replica's insides.
            places: which of them.
        """
        for place in places:
            parameter, vessel = parameters[place], vessels[place]
            known, version, trains, hooks, attributes = self._lent.get(place) or _marks(parameter)
            now = self._lent[place] = _marks(vessel)
            grad, old = vessel.grad, None if known is None else known()
            if grad is not old or now[1] != version or (grad is None) is not (known is None):
                _take_gradient(parameter, grad, in_place=grad is old)
            if now[2] is not trains:
                parameter.requires_grad_(now[2])
            if now[3] != hooks:
                put_hooks(parameter, now[3])
            if now[4] or attributes:
                parameter_attributes.send(vessel, attributes, parameter)


def _marks(vessel: torch.Tensor) -> tuple[Any, ...]:
    grad = vessel.grad  # weakly: what the step has let go must not take memory
    counted = (None, 0) if grad is None else (refer_to(grad), torch_internals.version_of(grad))
    return *counted, vessel.requires_grad, hooks_of(vessel), attributes_of(vessel)


def _take_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None, in_place: bool) -> None:
    own = parameter.grad
    if gradient is None:
        parameter.grad = None
    elif gradient.requires_grad:  # of a graph that can be derived once more
        parameter.grad = gradient.to(parameter.device)
    elif in_place and own is not None and are_alike(own, gradient) and own.layout is torch.strided:
        with torch.no_grad():
            own.copy_(gradient)  # where the program may have a view of it
    else:
        parameter.grad = copied(gradient, parameter.device)
