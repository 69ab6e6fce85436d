"""What is in force where ``run`` is called is so on every replica: modes, hooks of saved tensors, tiny numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tfstyle_dist as tfd


class HalvesProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.mul else result


class HalvesProductsBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.ops.aten.mul.Tensor else result


@pytest.fixture(params=[tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def three(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        yield strategy


def product() -> float:
    return torch.mul(torch.tensor(4.0), torch.tensor(3.0)).item()


@pytest.mark.parametrize("mode", [HalvesProducts, HalvesProductsBelow])
def test_modes(three: Any, mode: Any) -> None:
    with mode(), torch.device("cpu"):
        assert three.experimental_local_results(three.run(product)) == (6.0,) * 3
    with mode(), mode():
        assert three.experimental_local_results(three.run(product)) == (3.0,) * 3
    assert three.experimental_local_results(three.run(product)) == (12.0,) * 3


def test_modes_of_a_step_that_raises_end_with_it(three: Any) -> None:
    def fails() -> None:
        raise ValueError("no more data")

    with HalvesProducts(), HalvesProductsBelow(), pytest.raises(ValueError, match="no more data"):
        three.run(fails)
    assert three.experimental_local_results(three.run(product)) == (12.0,) * 3


def test_a_mode_whose_beginning_resets_it_counts_for_all(three: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        three.run(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    assert counter.get_total_flops() == 3 * 2 * 2 * 3 * 4


def test_hooks_of_saved_tensors(three: Any) -> None:
    with three.scope():
        model = torch.nn.Linear(1, 1, bias=False)

    def gradient() -> float:
        model.zero_grad()
        model(torch.tensor([[8.0]])).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    usual = three.experimental_local_results(three.run(gradient))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor / 4, lambda kept: kept):
        packed = three.experimental_local_results(three.run(gradient))
    assert packed == tuple(value / 4 for value in usual)
    assert three.experimental_local_results(three.run(gradient)) == usual


def test_numbers_that_are_not_normal(three: Any) -> None:
    def tiny() -> float:
        return (torch.tensor([1e-320], dtype=torch.float64) * 2).item()

    usual = three.experimental_local_results(three.run(tiny))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot take them for zero")
    try:
        flushed = three.experimental_local_results(three.run(tiny))
    finally:
        torch.set_flush_denormal(False)
    assert flushed == (0.0,) * 3  # compared here: before, every such number was equal to zero
    assert three.experimental_local_results(three.run(tiny)) == usual
    assert all(usual)
