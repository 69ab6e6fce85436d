"""Training steps as other people write them: each makes a model and a step over one share of the batch.

A case is a function that builds the model (in a strategy's scope or not) and returns it with its step. A step takes the
features and targets of its replica and trains once.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tfstyle_dist as tfd

Step = Callable[[torch.Tensor, torch.Tensor], Any]
Case = Callable[[], tuple[nn.Module, Step]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def usual(model: nn.Module, optimizer: Any = None) -> tuple[nn.Module, Step]:
    optimizer = sgd(model) if optimizer is None else optimizer

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return model, step


def _normalizing(across: type[nn.Module], shape: tuple[int, ...], **options: Any) -> tuple[nn.Module, Step]:
    # torch's own refuses the CPU once processes have met, so one device has what it stands for.
    kind = nn.SyncBatchNorm if tfd.has_strategy() else across
    model = nn.Sequential(
        nn.Linear(6, 12), nn.Unflatten(1, shape), kind(shape[0], **options), nn.Flatten(), nn.Linear(12, 3)
    )
    return usual(model, sgd(model))


@case
def batch_norm_over_all_replicas() -> tuple[nn.Module, Step]:
    return _normalizing(nn.BatchNorm1d, (12,))


@case
def batch_norm_over_all_replicas_of_images() -> tuple[nn.Module, Step]:
    return _normalizing(nn.BatchNorm2d, (3, 2, 2), momentum=None)


@case
def batch_norm_over_all_replicas_without_statistics() -> tuple[nn.Module, Step]:
    return _normalizing(nn.BatchNorm1d, (3, 4), affine=False, track_running_stats=False)


# ---- what modules keep --------------------------------------------------------------------------------------------


@case
def counts_its_calls() -> tuple[nn.Module, Step]:
    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    return usual(Counting())


@case
def rebinds_a_buffer() -> tuple[nn.Module, Step]:
    class Rebinding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps = self.steps + 1
            return super().forward(x) / self.steps

    return usual(Rebinding())


@case
def keeps_an_auxiliary_loss() -> tuple[nn.Module, Step]:
    class Auxiliary(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x))
            self.auxiliary = hidden.pow(2).mean()
            return self.second(hidden)

    model = Auxiliary()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + model.auxiliary).backward()
        optimizer.step()

    return model, step


@case
def keeps_lists_and_a_queue() -> tuple[nn.Module, Step]:
    class Remembering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []
            self.last: deque[float] = deque(maxlen=2)
            self.by_name = {"calls": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1.0)
            self.last.append(float(len(self.seen)))
            self.by_name["calls"] += 1
            return super().forward(x) / (sum(self.last) + self.by_name["calls"])

    return usual(Remembering())


# ---- optimizers ---------------------------------------------------------------------------------------------------


@case
def optimizer_counts_in_its_groups() -> tuple[nn.Module, Step]:
    class Decaying(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "step": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["step"] += 1
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] / group["step"])

    model = Net()
    return usual(model, Decaying(model.parameters()))


@case
def optimizer_that_draws_random_numbers() -> tuple[nn.Module, Step]:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(torch.randn_like(p), alpha=0.01)
            return super().step(closure)

    model = Net()
    one, two = (Noisy(part.parameters(), lr=0.1) for part in (model.first, model.second))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        one.step()
        two.step()

    return model, step


class BareWrapper(torch.optim.Optimizer):
    """A wrapper without groups of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


@case
def optimizer_wrapper_without_groups() -> tuple[nn.Module, Step]:
    model = Net()
    inner = sgd(model)
    wrapper = BareWrapper(inner)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        inner.zero_grad()
        F.mse_loss(model(x), y).backward()
        wrapper.step()

    return model, step


@case
def optimizer_in_an_optimizer() -> tuple[nn.Module, Step]:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base, self.param_groups, self.number = base, base.param_groups, 0
            self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()
            self.number += 1
            if self.number % 2 == 0:
                with torch.no_grad():
                    for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                        slow.lerp_(p, 0.5)
                        p.copy_(slow)

    model = Net()
    return usual(model, Lookahead(sgd(model)))


@case
def sharpness_aware() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        moves = [0.05 * p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()

    return model, step


@case
def scheduler_and_scaler_in_the_step() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    return model, step


@case
def closure_and_groups() -> tuple[nn.Module, Step]:
    model = Net()
    groups = [{"params": model.first.parameters(), "lr": 0.01}, {"params": model.second.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, step


@case
def second_derivatives() -> tuple[nn.Module, Step]:
    """Of AdaHessian's kind: the gradient that ``backward(create_graph=True)`` leaves is differentiated again."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(create_graph=True)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(g.requires_grad for g in found)
        penalty = sum((g**2).sum() for g in found)
        for p in model.parameters():
            p.grad = None
        (F.mse_loss(model(x), y) + 0.1 * penalty).backward()
        optimizer.step()

    return model, step


# ---- averages and copies ------------------------------------------------------------------------------------------


@case
def teacher_by_deepcopy() -> tuple[nn.Module, Step]:
    model = Net()
    teacher, optimizer = copy.deepcopy(model), sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + F.mse_loss(model(x), teacher(x).detach())).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.5)

    return nn.ModuleList([model, teacher]), step


@case
def averaged_model() -> tuple[nn.Module, Step]:
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    _, inner = usual(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        inner(x, y)
        average.update_parameters(model)

    return nn.ModuleList([model, average]), step


class ShadowWeights:
    """A running average in an object that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow, self.updates = [p.detach().clone() for p in model.parameters()], 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mine, p in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(p.detach(), 1 / (1 + self.updates))


@case
def shadow_weights_of_a_plain_object() -> tuple[nn.Module, Step]:
    model = Net()
    shadow, optimizer = ShadowWeights(model), sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        pull = sum((p - s).pow(2).sum() for p, s in zip(model.parameters(), shadow.shadow, strict=True))
        (F.mse_loss(model(x), y) + 0.1 * pull).backward()
        optimizer.step()
        shadow.update(model)

    return model, step


@case
def step_is_a_method() -> tuple[nn.Module, Step]:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.number = Net(), 0
            self.optimizer = sgd(self.model)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.number += 1
            self.optimizer.param_groups[0]["lr"] = 0.1 / self.number
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    trainer = Trainer()
    return trainer.model, trainer.step


@case
def step_is_partial() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)

    def step(model: nn.Module, optimizers: list[Any], x: torch.Tensor, y: torch.Tensor) -> None:
        optimizers[0].zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizers[0].step()

    return model, functools.partial(step, model, [optimizer])
