"""What the first replica did to parameters is seen outside of ``run``, wherever the replicas compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import on_devices
import pytest
import torch
from torch import nn

import tfstyle_dist as td

TWO = ["cpu:0", "cpu:1"]


@pytest.fixture(params=["central", "mirrored"])
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    """Two replicas, with one copy of the parameters or one each."""
    kind = td.experimental.CentralStorageStrategy if request.param == "central" else td.MirroredStrategy
    with kind(TWO) as made:
        yield made


class Trained:
    """A model with its optimizer, in a strategy or alone."""

    def __init__(self, strategy: td.Strategy | None = None) -> None:
        self.strategy = strategy
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        state = {n: torch.linspace(-1, 1, v.numel()).view_as(v) for n, v in self.model.state_dict().items()}
        self.model.load_state_dict(state)
        if strategy is not None:
            strategy.experimental_adopt(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        if strategy is not None:
            strategy.experimental_adopt(self.optimizer)

    def run(self, function: Callable[[], Any]) -> Any:
        return function() if self.strategy is None else self.strategy.run(function)

    def loss(self) -> torch.Tensor:
        x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
        return self.model(x.to(next(self.model.parameters()).device)).square().sum()

    def numbers(self) -> torch.Tensor:
        return torch.cat([p.detach().cpu().reshape(-1) for p in self.model.parameters()])


def check(strategy: td.Strategy, program: Callable[[Trained], Any]) -> None:
    """A program ends with the weights of one device, outside and in every replica, and returns the same."""
    ours, alone = Trained(strategy), Trained()
    with torch.device("cpu"):
        expected = program(alone)
    found = program(ours)
    if expected is not None:
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.numbers(), alone.numbers())
    for numbers in strategy.experimental_local_results(strategy.run(ours.numbers)):
        torch.testing.assert_close(numbers.cpu(), alone.numbers())


def backward(trained: Trained) -> Callable[[], None]:
    return lambda: trained.loss().backward()


def test_an_optimizer_steps_outside(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> None:
        for _ in range(3):
            trained.optimizer.zero_grad()
            trained.run(backward(trained))
            trained.optimizer.step()

    check(strategy, program)


def test_gradients_are_edited_outside(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> float:
        trained.run(backward(trained))
        norm = nn.utils.clip_grad_norm_(trained.model.parameters(), 0.5)
        trained.run(trained.optimizer.step)
        return float(norm)

    check(strategy, program)


def test_gradients_add_up_in_the_tensors_that_were_there(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> torch.Tensor:
        trained.run(backward(trained))
        kept = trained.model[0].weight.grad
        trained.run(backward(trained))
        assert trained.model[0].weight.grad is kept
        trained.run(trained.optimizer.step)
        return torch.as_tensor(kept).cpu().clone()

    check(strategy, program)


def test_a_step_that_lets_its_gradients_go(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> list[bool]:
        def step() -> None:
            trained.loss().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()

        trained.run(backward(trained))
        trained.run(step)
        return [p.grad is None for p in trained.model.parameters()]

    check(strategy, program)


def test_what_a_step_freezes_is_frozen(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> list[bool]:
        def freeze() -> None:
            trained.model[0].requires_grad_(False)

        trained.run(freeze)
        trained.optimizer.zero_grad()
        trained.run(backward(trained))
        trained.optimizer.step()
        return [p.requires_grad for p in trained.model.parameters()]

    check(strategy, program)


def test_what_a_step_froze_before_it_raised(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> list[bool]:
        def freeze() -> None:
            trained.loss().backward()
            trained.model[0].weight.requires_grad_(False)
            raise ArithmeticError("after backward")

        with pytest.raises(ArithmeticError):
            trained.run(freeze)
        trained.run(trained.optimizer.step)
        return [p.requires_grad for p in trained.model.parameters()]

    check(strategy, program)


def test_hooks_and_attributes_that_a_step_gives_to_parameters(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> torch.Tensor:
        weight: Any = trained.model[0].weight

        def give() -> None:
            weight.register_hook(lambda grad: grad * 2)
            weight.importance = torch.ones_like(weight)
            weight.label = "first"

        def add() -> None:
            weight.importance.add_(weight.grad.abs())
            del weight.label

        trained.run(give)
        assert weight.label == "first"
        trained.run(backward(trained))
        trained.run(add)
        assert not hasattr(weight, "label")
        trained.optimizer.step()
        return weight.importance.cpu()

    check(strategy, program)


def test_an_attribute_of_a_parameter_is_written_to_outside(strategy: td.Strategy) -> None:
    """As masks are, or the importance of weights for earlier tasks."""

    def program(trained: Trained) -> None:
        weight: Any = trained.model[0].weight
        weight.mask, weight.rate = torch.ones_like(weight).detach(), 1.0
        weight.kept = {"steps": 0, "sums": [torch.zeros_like(weight).detach()]}

        def step() -> None:
            trained.optimizer.zero_grad()
            trained.loss().backward()
            weight.kept["steps"] += 1
            weight.kept["sums"][0].add_(weight.grad)
            weight.grad.mul_(weight.mask * getattr(weight, "rate", 3.0))
            weight.grad.add_(weight.kept["sums"][0], alpha=0.01 * weight.kept["steps"])
            trained.optimizer.step()

        trained.run(step)
        weight.mask[1:].zero_()
        trained.run(step)
        weight.kept["sums"][0].mul_(0.5)
        trained.run(step)
        weight.kept["steps"] = 1
        weight.rate = 2.0
        trained.run(step)
        del weight.rate
        trained.run(step)

    check(strategy, program)


@pytest.mark.cpu_only("it makes tensors in inference mode, which the pretend accelerator cannot copy")
def test_an_attribute_that_was_made_in_inference_mode(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> torch.Tensor:
        weight: Any = trained.model[0].weight
        with torch.inference_mode():
            weight.importance = torch.ones_like(weight) * 2

        def step() -> None:
            trained.optimizer.zero_grad()
            trained.loss().backward()
            with torch.no_grad():
                weight.grad.mul_(weight.importance)
            trained.optimizer.step()

        trained.run(step)
        trained.run(step)
        return weight.importance.cpu().clone()

    check(strategy, program)


def test_weights_are_exchanged_for_averages_and_put_back(strategy: td.Strategy) -> None:
    """The averages are in the place of the weights for a while, and go on as what they were."""

    def program(trained: Trained) -> torch.Tensor:
        class Averages:
            def __init__(self) -> None:
                self.model = trained.model
                here = torch.empty(0).device  # where replicas compute
                self.values = {name: p.data.to(here, copy=True) for name, p in self.model.named_parameters()}
                self.kept: dict[str, torch.Tensor] = {}

            def update(self) -> None:
                for name, p in self.model.named_parameters():
                    self.values[name] = 0.5 * p.data + 0.5 * self.values[name]

        averages = Averages()

        def step() -> torch.Tensor:
            trained.optimizer.zero_grad()
            trained.loss().backward()
            trained.optimizer.step()
            averages.update()
            return torch.cat([v.reshape(-1) for v in averages.values.values()])

        trained.run(step)
        averages.kept = {name: p.data for name, p in trained.model.named_parameters()}
        for name, p in trained.model.named_parameters():
            p.data = averages.values[name]
        trained.run(trained.loss)
        for name, p in trained.model.named_parameters():
            p.data = averages.kept[name]
        trained.run(step)
        found = trained.run(step)
        every = [found] if trained.strategy is None else trained.strategy.experimental_local_results(found)
        assert all(torch.equal(every[0].cpu(), value.cpu()) for value in every)
        return every[0].cpu()

    check(strategy, program)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_can_be_derived_again(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> list[bool]:
        def step() -> None:
            trained.loss().backward(create_graph=True)

        trained.run(step)
        kept = [p.grad is not None and p.grad.requires_grad for p in trained.model.parameters()]
        trained.run(trained.optimizer.step)
        trained.run(trained.optimizer.zero_grad)
        return kept

    check(strategy, program)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_optimizer_that_derives_in_its_step(strategy: td.Strategy) -> None:
    """As those with a Hessian do; the one copy is not what the loss was computed with on another device."""

    class Curved(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            parameters = self.param_groups[0]["params"]
            if parameters:
                slope = torch.stack([p.grad.square().sum() for p in parameters]).sum()
                curves = torch.autograd.grad(slope, parameters)
                with torch.no_grad():
                    for p, curve in zip(parameters, curves, strict=True):
                        p.sub_(p.grad / (1 + curve.abs()), alpha=0.1)

    def program(trained: Trained) -> None:
        optimizer = Curved(trained.model.parameters())
        if trained.strategy is not None:
            trained.strategy.experimental_adopt(optimizer)

        def step() -> None:
            optimizer.zero_grad()
            trained.loss().backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()

        trained.run(step)
        trained.run(step)

    if isinstance(strategy, td.MirroredStrategy):
        check(strategy, program)
    elif on_devices.KIND == "cpu":  # what it derives is reduced, by one replica alone
        with pytest.raises(RuntimeError, match=r"Curved.step\(\) calls .* that waits for the other replicas"):
            check(strategy, program)
    else:
        with pytest.raises(RuntimeError) as caught:
            check(strategy, program)
        assert "An optimizer that derives in its step" in "".join(caught.value.__notes__)


def test_gradients_that_are_parts_of_one_tensor(strategy: td.Strategy) -> None:
    def program(trained: Trained) -> None:
        parameters = list(trained.model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=parameters[0].device)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        trained.run(backward(trained))
        flat.mul_(0.5)
        trained.run(trained.optimizer.step)

    central = isinstance(strategy, td.experimental.CentralStorageStrategy)
    if central and on_devices.KIND != "cpu":
        with pytest.raises(RuntimeError, match="parts of one tensor"):
            check(strategy, program)
    else:
        check(strategy, program)
