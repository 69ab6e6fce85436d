"""Variables in what asks no ``__torch_function__``: functions of ``torch.autograd.Function``, and ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functional_code import WAYS, Model, Scaled, X, energy
from torch import func

import tfstyle_dist as tfd
from tfstyle_dist.testing.runner import run_script


@pytest.fixture(params=["none", "one", "mirrored", "central"])
def strategy(request: Any) -> Iterator[Any]:
    two = ["cpu:0", "cpu:1"]
    made: dict[str, Callable[[], Any]] = {
        "one": lambda: tfd.OneDeviceStrategy("cpu:0"),
        "mirrored": lambda: tfd.MirroredStrategy(two),
        "central": lambda: tfd.experimental.CentralStorageStrategy(two),
    }
    if request.param == "none":
        yield tfd.get_strategy()
        return
    with made[request.param]() as found:
        yield found


def variable(strategy: Any) -> Any:
    with strategy.scope():
        made = tfd.Variable(torch.zeros(3), trainable=True)
    made.assign(torch.arange(3.0) + 1)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_is_taken_as_its_value(strategy: Any, way: str) -> None:
    expected = WAYS[way](torch.nn.Parameter(torch.arange(3.0) + 1)).detach()
    torch.testing.assert_close(WAYS[way](variable(strategy)).detach(), expected)
    made = variable(strategy)
    for found in strategy.experimental_local_results(strategy.run(lambda: WAYS[way](made).detach().clone())):
        torch.testing.assert_close(found, expected)


def test_gradients_of_a_variable_and_of_a_leaf_in_the_memory_of_another(strategy: Any) -> None:
    made, other = variable(strategy), variable(strategy)
    own = other.detach().requires_grad_()
    outputs = (made * own).sum()
    for inputs in ([own, made], [made, own]):
        for gradient in torch.autograd.grad(outputs, inputs, retain_graph=True):
            assert gradient.tolist() == [1, 2, 3]


def test_a_variable_gets_its_gradient_from_a_function(strategy: Any) -> None:
    made = variable(strategy)

    def step() -> torch.Tensor:
        made.grad = None
        Scaled.apply(torch.full((3,), 2.0), made).sum().backward()
        return made.grad.clone()

    for gradient in strategy.experimental_local_results(strategy.run(step)):
        assert gradient.tolist() == [2, 2, 2]


class Counting(torch.autograd.Function):
    """A function that writes to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: Any) -> torch.Tensor:
        count.add_(1)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("on_read", [False, True])
def test_a_function_may_write_to_a_variable_that_requires_no_gradient(strategy: Any, on_read: bool) -> None:
    kind = tfd.VariableSynchronization.ON_READ if on_read else tfd.VariableSynchronization.AUTO
    with strategy.scope():
        count = tfd.Variable(
            torch.zeros(3), trainable=False, synchronization=kind, aggregation=tfd.VariableAggregation.MEAN
        )
    Counting.apply(torch.ones(3, requires_grad=True), count)
    copies = strategy.experimental_local_results(strategy.run(lambda: count.detach().clone()))
    assert [copy.tolist() for copy in copies] == [[1, 1, 1]] * len(copies)


def test_a_function_may_not_write_to_a_variable_that_does(strategy: Any) -> None:
    made = variable(strategy)
    with pytest.raises(RuntimeError, match=r"Counting\.forward wrote to a variable that it was given"):
        Counting.apply(torch.ones(3, requires_grad=True), made)


@pytest.mark.cpu_only("the weights of a compiled function; devices have tests of their own")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does so
def test_functions_in_compiled_steps() -> None:
    torch._dynamo.reset()

    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert variable(strategy) is not None
        with strategy.scope():
            model = Model()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

        def step() -> torch.Tensor:
            compiled(torch.full((3,), 2.0)).sum().backward()
            return model.weight.grad.clone()

        for gradient in strategy.experimental_local_results(strategy.run(step)):
            assert gradient.tolist() == [2, 2, 2]
        squares = torch.compile(lambda x: func.vmap(func.grad(energy))(x), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(squares(torch.ones(1, 3)), 2 * X[None] ** 2)
        with torch.compiler.set_stance("fail_on_recompile"), tfd.OneDeviceStrategy("cpu:0") as another:
            assert variable(another) is not None
            torch.testing.assert_close(squares(torch.ones(1, 3)), 2 * X[None] ** 2)


def test_torch_is_as_it_was_when_the_last_variable_is_gone() -> None:
    program = """
import gc, torch, tfstyle_dist as tfd
from torch._functorch import eager_transforms, vmap
wrapped = lambda: (vars(torch.autograd.Function).get("apply"), eager_transforms._wrap_for_grad, vmap._add_batch_dim)
before = wrapped()
with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
    made = tfd.Variable(1.0)
assert not any(a is b for a, b in zip(wrapped(), before)), wrapped()
del strategy
gc.collect()
assert wrapped() != before
del made
gc.collect()
assert wrapped() == before, wrapped()
"""
    result = run_script(["-c", program])
    assert result.returncode == 0, result.stderr
