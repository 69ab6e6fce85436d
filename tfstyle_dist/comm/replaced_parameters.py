"""Optimizers that were made before a model was divided: they hold the parameters that it had before."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tfstyle_dist.core.process_hooks import Hooks

_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


def note_replaced(parameter: torch.Tensor, name: str) -> None:
    """Remembers, as long as it lives, a parameter in whose place a module has a divided one now.

    While ``step_checks`` is installed, an optimizer that holds it, and so would train what the model does not have any
    more, is refused at its next step.
    """
    number = id(parameter)
    _replaced[number] = weakref.ref(parameter, lambda _: _replaced.pop(number, None)), name


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    names = [
        _replaced[id(parameter)][1]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in _replaced
    ]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__} was made before the model was divided: it holds the parameters that were "
            f"there before of {', '.join(names[:4])}{', ...' * (len(names) > 4)}, and a step would train nothing of "
            "these layers. Make the optimizer after experimental_partition."
        )


step_checks = Hooks(lambda: register_optimizer_step_pre_hook(_check))
"""For strategies whose replicas have several parts."""
