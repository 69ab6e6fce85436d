"""What programs do with the memory of parameters, gradients and optimizer state, on one device and on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from central_ranks import loss_of, own_half
from torch import nn

Values = list[Any]


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()


def nothing(model: nn.Module) -> None: ...


class Job:
    """A model and an optimizer, and how a step is run.

    Args:
        strategy: of the ranks; ``None``: one device.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.make()

    def make(self, change: Callable[[Any], None] = nothing) -> None:
        """Anew; ``change`` is called before the scope ends."""
        if self._strategy is None:
            self.model: Any = build()
            change(self.model)
        else:
            with self._strategy.scope():
                self.model = build()
                change(self.model)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.01, eps=1e-3)

    def run(self, step: Callable[[], None]) -> None:
        """One step."""
        if self._strategy is None:
            step()
        else:
            self._strategy.run(step)

    def backward(self, number: int, model: Any = None) -> None:
        """Called in a step."""
        part = slice(0, 8) if self._strategy is None else own_half()
        loss_of(model or self.model, part, number).backward()

    def train(self, *numbers: int, zero: bool = True) -> None:
        """Some steps."""
        for number in numbers:

            def step(number: int = number) -> None:
                if zero:
                    self.optimizer.zero_grad()
                self.backward(number)
                self.optimizer.step()

            self.run(step)


def tied_in_the_scope(job: Job) -> Values:
    def tie(model: Any) -> None:
        model[2].weight.data = model[0].weight.data.t()

    job.make(tie)
    job.train(0, 1)
    return []


def tied_between_steps(job: Job) -> Values:
    job.train(0, 1)
    job.model[2].weight.data = job.model[0].weight.data
    job.train(2, 3)
    job.model[0].weight.data.mul_(0.5)
    job.train(4)
    return []


def three_are_tied(job: Job) -> Values:
    job.make(lambda model: model.append(nn.Linear(1, 1).double()))
    job.train(0)
    rows = job.model[0].weight.data
    job.model[4].weight.data, job.model[2].bias.data = rows[:1], rows[0]
    job.train(1, 2)
    return [job.model[0].weight]


def exchanged(job: Job) -> Values:
    job.train(0)
    first, second = job.model[0].weight, job.model[2].weight
    first.data, second.data = second.data, first.data
    job.train(1, 2)
    return []


def weights_in_one_vector(job: Job) -> Values:
    job.train(0)
    flat = torch.cat([p.data.flatten() for p in job.model.parameters()])
    torch.nn.utils.vector_to_parameters(flat, job.model.parameters())
    job.train(1, 2)
    flat.mul_(0.9)
    job.train(3)
    return [flat]


def alias_of_converted(job: Job) -> Values:
    job.train(0)
    job.model.float().double()
    alias = job.model[0].weight.data
    job.train(1, 2)
    return [alias]


def two_optimizers_of_converted(job: Job) -> Values:
    other = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    first = job.optimizer
    for optimizer in (first, other, first, other):
        job.optimizer = optimizer
        job.train(0)
    job.model.float().double()
    for optimizer in (first, other, first, other):
        job.optimizer = optimizer
        job.train(1)
    return []


def kept_gradients(job: Job) -> Values:
    job.train(0)
    kept = [p.grad for p in job.model.parameters()]
    parts = [p.grad.view(-1)[:5] for p in job.model.parameters()]
    job.train(1, 2)
    kept += [p.grad for p in job.model.parameters()]
    job.train(3)
    return kept + parts


def gradient_that_grows(job: Job) -> Values:
    job.train(0)
    kept = job.model[0].weight.grad
    job.train(1, 2, zero=False)
    assert job.model[0].weight.grad is kept
    return [kept]


def gradient_that_nobody_adds_to(job: Job) -> Values:
    job.train(0)
    kept = job.model[4].weight.grad
    kept.mul_(0.5)

    def step() -> None:
        (job.model[0].weight * 2).sum().backward()
        job.optimizer.step()

    job.run(step)
    job.train(1)
    return [kept]


def gradients_in_one_vector(job: Job) -> Values:
    flat = torch.zeros(sum(p.numel() for p in job.model.parameters()), dtype=torch.float64)
    parts = flat.split([p.numel() for p in job.model.parameters()])
    for parameter, part in zip(job.model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    job.train(0, 1, zero=False)
    flat.zero_()
    job.train(2, zero=False)
    return [flat]


def own_gradients(job: Job) -> Values:
    own = [torch.zeros_like(p) for p in job.model.parameters()]
    for number in range(2):
        for parameter, gradient in zip(job.model.parameters(), own, strict=True):
            parameter.grad = gradient
        job.train(number, zero=False)
        job.optimizer.zero_grad()
    return own


def state_written(job: Job) -> Values:
    job.train(0, 1)
    state = job.optimizer.state[job.model[0].weight]
    kept = state["exp_avg"]
    kept.mul_(0.5)
    state["step"].zero_()
    job.train(2, 3)
    return [kept, state["step"]]


def state_replaced(job: Job) -> Values:
    job.train(0, 1)
    for state in job.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5
        state["step"] = torch.tensor(7.0)
    job.train(2, 3)
    return []


def state_kept(job: Job) -> Values:
    job.train(0)
    state = job.optimizer.state[job.model[0].weight]
    first = state["exp_avg"]
    state["exp_avg_sq"] = second = state["exp_avg_sq"] * 2
    job.train(1)
    job.model[2].weight.data = job.model[0].weight.data
    job.train(2)
    return [first, second, state["exp_avg"], state["step"]]


def state_cleared(job: Job) -> Values:
    job.train(0, 1)
    job.optimizer.state.clear()
    job.train(2, 3)
    del job.optimizer.state[job.model[2].weight]
    job.train(4, 5)
    return []


def frozen_with_a_gradient(job: Job) -> Values:
    job.train(0)
    job.model[0].weight.requires_grad_(False)
    job.train(1, 2, zero=False)
    return []


def exchanged_again(job: Job) -> Values:
    exchanged(job)
    job.model[2].bias.data = job.model[0].bias.data
    job.train(3)
    model = job.model
    model[2].bias.data, model[4].weight.data = model[4].weight.data[0], model[2].bias.data.view(1, 20)
    job.train(4, 5)
    return []


class OverAll(torch.optim.Optimizer):
    """A rule that looks at all parameters together, keeps a number of its own, and draws random numbers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "seen": 0.0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        self.steps += 1
        norm = sum(p.grad.square().sum() for group in self.param_groups for p in group["params"]).sqrt()
        for group in self.param_groups:
            group["seen"] += float(norm)
            for p in group["params"] if group["lr"] else ():
                p.add_(p.grad / norm + 0.01 * torch.randn_like(p), alpha=-group["lr"] / self.steps)
                self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad


class Sharpness(torch.optim.Optimizer):
    """Goes up, looks again, and lets another optimizer go down."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.Adam(self.param_groups, lr=0.01, eps=1e-3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        ups = [0.01 * p.grad for p in parameters]
        for p, up in zip(parameters, ups, strict=True):
            p.add_(up)
        with torch.enable_grad():
            closure()
        for p, up in zip(parameters, ups, strict=True):
            p.sub_(up)
        self.inner.step()


def looks_at_all(job: Job) -> Values:
    job.optimizer = OverAll(job.model.parameters())
    torch.manual_seed(3)
    job.train(0, 1, 2)
    return [torch.tensor(job.optimizer.param_groups[0]["seen"]), torch.rand(3)]


def wraps_another(job: Job) -> Values:
    job.optimizer = Sharpness(job.model.parameters())

    def step(number: int) -> None:
        def closure() -> None:
            job.optimizer.zero_grad()
            job.backward(number)

        closure()
        job.optimizer.step(closure)

    for number in range(3):
        job.run(lambda number=number: step(number))
    return [v for state in job.optimizer.inner.state.values() for v in state.values()]


def hooks_of_gradients(job: Job) -> Values:
    job.train(0)
    norms: Values = []
    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(torch.tensor(p.grad.shape)))
    job.train(1, 2)
    return norms


class _Angle(nn.Parameter):
    """A parameter that is added to in another way: it stays of length 1, as rotations of pypose do."""

    def add_(self, other: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
        with torch.no_grad():
            moved = self.as_subclass(torch.Tensor) + alpha * other
            return self.copy_(moved / moved.norm())


def parameter_of_a_class_of_its_own(job: Job) -> Values:
    def change(model: Any) -> None:
        model[0].weight = _Angle(nn.functional.normalize(model[0].weight.detach().reshape(1, -1)).reshape(20, 20))

    job.make(change)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, foreach=False)
    job.train(0, 1, 2)
    torch.testing.assert_close(job.model[0].weight.norm().item(), 1.0)
    return []


def gradients_written_with_a_graph(job: Job) -> Values:
    def step() -> None:
        job.backward(0)
        for parameter in job.model.parameters():
            parameter.grad.sub_(parameter * 0.1)
            parameter.grad = parameter.grad.detach()
        job.optimizer.step()

    job.run(step)
    return []


CASES = [
    tied_in_the_scope, tied_between_steps, three_are_tied, exchanged, weights_in_one_vector, alias_of_converted,
    two_optimizers_of_converted, kept_gradients, gradient_that_grows, gradient_that_nobody_adds_to,
    gradients_in_one_vector, own_gradients, state_written, state_replaced, state_kept, state_cleared,
    frozen_with_a_gradient, exchanged_again, looks_at_all, wraps_another, hooks_of_gradients,
    gradients_written_with_a_graph, parameter_of_a_class_of_its_own,
]  # fmt: skip
