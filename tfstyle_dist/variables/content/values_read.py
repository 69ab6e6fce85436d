"""Which parameters may have been written to through their ``.data`` in cross-replica context, which leaves no mark."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.variables.content.parameter_marks import are_alike

MOST_ELEMENTS = 1 << 20
"""Of a frozen parameter whose values are kept for comparison: larger ones are weights, which are the same on all."""

_Kept = tuple[Callable[[], torch.Tensor | None], torch.Tensor]


class ValuesRead:
    """The parameters whose ``data`` somebody has, since the last run.

    Most count as written to: their copies are equal, so that copying one of them once more changes nothing. A frozen
    one may have statistics of a share, which are each replica's own and must outlive a program that reads alone
    (``copy.deepcopy`` does so). Its values are compared with those that it had when it was read first.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._kept: dict[int, _Kept] = {}

    def note(self, parameter: torch.Tensor, is_set: bool) -> None:
        """Somebody has the ``data`` of a parameter now, or has set it."""
        number = id(parameter)
        if is_set:
            self._kept.pop(number, None)
        elif number not in self._numbers and _may_be_statistics(parameter):
            with torch.no_grad():
                values = parameter.clone()
            if type(values) is torch.Tensor:  # no stand-in of a mode that traces
                self._kept[number] = refer_to(parameter), values
        self._numbers.add(number)

    def forget(self, parameter: torch.Tensor) -> None:
        """It is known not to have been written to."""
        self._numbers.discard(id(parameter))
        self._kept.pop(id(parameter), None)

    def take(self) -> set[int]:
        """The ``id`` of each that may have been written to; forgets all."""
        kept, numbers = self._kept, self._numbers
        self._kept, self._numbers = {}, set()
        with torch.no_grad():
            equal = {number: _are_equal(reference(), values) for number, (reference, values) in kept.items()}
        return {number for number in numbers if number not in equal or not equal[number]}


def _may_be_statistics(parameter: torch.Tensor) -> bool:
    if parameter.requires_grad or parameter.is_meta or torch_internals.transforms_are_active():
        return False
    return parameter.layout is torch.strided and parameter.numel() <= MOST_ELEMENTS


def _are_equal(parameter: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | bool:
    """Not known yet on an accelerator: all comparisons are launched before the first is waited for."""
    if parameter is None or parameter.device != values.device or not are_alike(parameter, values):
        return False
    return ((parameter == values) | ((parameter != parameter) & (values != values))).all()
