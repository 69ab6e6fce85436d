"""What is trained: a built-in model, or the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

Batch = Sequence[Tensor]


@dataclass(frozen=True)
class Workload:
    """One model with its data.

    Attributes:
        model: Freshly built; its parameters belong to the strategy in whose scope it was built.
        loss: Called as ``loss(model, *batch)``; returns the loss of each example, a tensor with one dimension.
        batches: Global batches, used over and over; a batch is a sequence of tensors whose first dimension is the
            examples.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    batches: Sequence[Batch]


def find(name: str) -> Callable[[], Workload]:
    """The function that builds a workload: a user's ``module:function``, or the built-in one for ``""``.

    The function takes no arguments and returns ``(model, loss, batches)``, see ``Workload``. It is called once for each
    combination, after ``torch.manual_seed(0)`` and in the scope of the strategy.

    Raises:
        ValueError: The name has another form, or there is no such function.
    """
    if not name:
        return _built_in
    module_name, colon, function_name = name.partition(":")
    if not colon or not function_name:
        raise ValueError(f"the workload {name!r} is no module:function; write e.g. my_package.my_module:workload")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ValueError(f"there is no module {error.name!r} for the workload {name!r}; is it in {here}?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"module {module_name!r} has no function {function_name!r}; it is to build the workload")

    def build() -> Workload:
        result = function()
        try:
            model, loss, batches = result
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} returned a {type(result).__name__}, not (model, loss, batches)") from error
        return Workload(model, loss, batches)

    return build


def _built_in() -> Workload:
    """A multilayer perceptron of 0.9 million parameters that learns the classes another network gives to noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 64, generator=generator)
    first, second = torch.randn(64, 128, generator=generator), torch.randn(128, 10, generator=generator)
    y = ((x @ first).relu() @ second).argmax(1)
    model = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 1024), nn.ReLU(), nn.Linear(1024, 10))
    batches = list(zip(x.split(128), y.split(128), strict=True))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    return Workload(model, loss, batches)
