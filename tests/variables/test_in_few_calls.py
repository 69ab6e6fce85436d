"""What is compared, summed and drawn in few calls for all objects gives what it gives one by one."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tfstyle_dist as td


@pytest.fixture
def strategy() -> Iterator[td.MirroredStrategy]:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: dict[str, Any] = {"list": [1, [2]], "dict": {"a": {}}, "tensors": [torch.zeros(1)], "set": {1}}
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.queue = collections.deque([[1]])

    def forward(self) -> str:
        inner = {**self.inner, "tensors": [tensor.tolist() for tensor in self.inner["tensors"]]}  # on any device
        return repr((inner, self.ordered, self.queue))


WRITES: dict[str, Callable[[Holder], Any]] = {
    "entry": lambda m: m.inner["list"].__setitem__(0, 5),
    "inner list": lambda m: m.inner["list"][1].append(3),
    "inner list replaced": lambda m: m.inner["list"].__setitem__(1, [7]),
    "empty dict": lambda m: m.inner["dict"]["a"].update(b=1),
    "key": lambda m: m.inner.update([(f"{list(m.inner)[-1]} again", m.inner.popitem()[1])]),
    "order": lambda m: m.ordered.move_to_end("a"),
    "deque": lambda m: m.queue[0].append(2),
    "tensor": lambda m: m.inner["tensors"][0].add_(1),
    "tensor's memory": lambda m: m.inner["tensors"][0].set_(torch.ones(1)),
    "set": lambda m: m.inner["set"].add(2),
    "attribute": lambda m: setattr(m, "other", {}),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_is_deep_inside_of_an_attribute_reaches_the_other_replica(
    strategy: td.MirroredStrategy, write: str
) -> None:
    with strategy.scope():
        module = Holder()
    for _ in range(3):
        strategy.run(lambda: module())
    for _ in range(2):  # what was marked anew is seen as well
        WRITES[write](module)
        first, second = strategy.experimental_local_results(strategy.run(lambda: module()))
        assert first == second == module()


class Noisy(torch.optim.SGD):
    """A class of the program's own, whose step draws."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        add_noise(self)
        return super().step(closure)


def add_noise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.add_(torch.randn_like(parameter))


class Stochastic(nn.Parameter):
    """A class of parameters whose updates draw, as those of low precision with stochastic rounding."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function.__name__ in ("add_", "_foreach_add_"):
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                for target in args[0] if isinstance(args[0], list) else [args[0]]:
                    target.sub_(torch.randn_like(target))
        return result


@pytest.mark.parametrize("draws", ["class", "hook", "hook of all", "closure", "parameter"])
def test_what_is_drawn_in_a_step_is_the_same_on_all_replicas(strategy: td.MirroredStrategy, draws: str) -> None:
    with strategy.scope():
        model = nn.Linear(3, 1, bias=False)
        if draws == "parameter":
            model.weight = Stochastic(model.weight.detach())
    optimizer = (Noisy if draws == "class" else torch.optim.SGD)(model.parameters(), lr=0.1)
    if draws == "hook":
        optimizer.register_step_pre_hook(add_noise)
    of_all = register_optimizer_step_pre_hook(add_noise) if draws == "hook of all" else None

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.rand(1)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(*[lambda: add_noise(optimizer)] if draws == "closure" else [])
        return model.weight.detach().clone(), own

    before = model.weight.detach().clone()
    try:
        for _ in range(3):
            weights, drawn = strategy.run(step)
            assert torch.equal(*weights.values)
            assert drawn.values[0] != drawn.values[1]
    finally:
        if of_all is not None:
            of_all.remove()
    assert not torch.allclose(before - model.weight, torch.full((1, 3), 0.3)), "nothing was drawn"


def test_a_step_that_draws_nothing_leaves_every_stream_as_one_that_could(strategy: td.MirroredStrategy) -> None:
    class Quiet(torch.optim.SGD):
        pass

    drawn = []
    for kind in (torch.optim.SGD, Quiet):
        with strategy.scope():
            model = nn.Linear(3, 1)
        optimizer = kind(model.parameters(), lr=0.1)

        def step(model: Any = model, optimizer: Any = optimizer) -> list[torch.Tensor]:
            numbers = [torch.rand(2)]
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            return [*numbers, torch.rand(2)]

        torch.manual_seed(3)
        drawn.append([[v.tolist() for part in strategy.run(step) for v in part.values] for _ in range(3)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
def test_the_mean_of_two_gradients_is_their_sum_over_two_to_the_last_bit(
    strategy: td.MirroredStrategy, dtype: torch.dtype
) -> None:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    numbers = torch.tensor([[smallest, 3 * smallest, 1.1, 3e38], [2 * smallest, 0.0, 1e-30, 0.3]], dtype=torch.float64)
    given = numbers.to(dtype)
    with strategy.scope():
        model = nn.Linear(4, 1, bias=False, dtype=dtype)

    def step() -> torch.Tensor:
        model.zero_grad()
        (model.weight * given[replica()]).sum().abs().backward() if dtype.is_complex else (
            model.weight * given[replica()]
        ).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    first, second = strategy.experimental_local_results(strategy.run(step))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    if not dtype.is_complex:
        expected = ((given[0].double() + given[1].double()) if dtype is torch.bfloat16 else given[0] + given[1]) / 2
        assert torch.equal(first[0].view(torch.uint8), expected.to(dtype).view(torch.uint8))
