"""Functions that do more than one update, and what they write to where an update does not go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import tfstyle_dist as tfd

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LARGE = 70_000
"""More elements than a server copies for a worker of its host: the worker uses the server's own memory."""


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        return self.last(torch.tanh(hidden) + self.mean)


def batch(number: int, width: int = 3) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: Any, first: int, count: int, width: int = 3) -> list[float]:
    losses = []
    for number in range(first, first + count):
        optimizer.zero_grad()
        loss = model(batch(number, width)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def build(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Net(width)


@pytest.mark.parametrize("width", [3, LARGE])
def test_several_steps_in_a_function_are_those_of_one_device(cluster: Any, width: int) -> None:
    c = cluster(workers=1, ps=2)
    with c.strategy.scope():
        model = build(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    alone = build(width)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)

    def steps(first: int) -> list[float]:
        return train(model, optimizer, first, 3, width)

    for first in (0, 3):
        losses = c.coordinator.schedule(steps, args=(first,)).fetch()
        expected = train(alone, alone_optimizer, first, 3, width)
        assert losses == pytest.approx(expected, rel=1e-5)
    for (name, ours), theirs in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def without_reading(model: nn.Module, optimizer: Any, width: int) -> None:
    """Steps between which nothing asks for a value: with all gradients twice, with some, and with all again."""
    parameters = list(model.parameters())
    model(batch(0, width)).square().mean().backward()
    gradients = [parameter.grad for parameter in parameters]
    optimizer.step()
    optimizer.step()
    for some in (parameters[:1], parameters[-1:], parameters[1:]):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if any(parameter is one for one in some) else None
        optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("width", [3, LARGE])
@pytest.mark.parametrize(
    "kind",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.05, eps=0.1),  # so that rounding stays rounding
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    ],
    ids=["adam", "sgd with decay", "sgd"],
)
def test_steps_between_which_nothing_is_read(cluster: Any, kind: Callable[..., Any], width: int) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))

    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = net()
    optimizer, alone = kind(model.parameters()), net()
    c.coordinator.schedule(without_reading, args=(model, optimizer, width)).fetch()
    without_reading(alone, kind(alone.parameters()), width)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_updates_between_which_nothing_is_read(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        variable, other = tfd.Variable(torch.ones(3)), tfd.Variable(torch.ones(2))
        optimizer = tfd.train.AdamOptimizer(0.1)

    def updates() -> None:
        for gradients in ([(torch.ones(3), variable)], [(torch.ones(2), other)], [(torch.ones(3), variable)]):
            optimizer.apply_gradients(gradients)

    c.coordinator.schedule(updates).fetch()
    one_device = tfd.OneDeviceStrategy("cpu")
    with one_device.scope():
        alone, another = tfd.Variable(torch.ones(3)), tfd.Variable(torch.ones(2))
        same = tfd.train.AdamOptimizer(0.1)
    for gradients in ([(torch.ones(3), alone)], [(torch.ones(2), another)], [(torch.ones(3), alone)]):
        same.apply_gradients(gradients)
    torch.testing.assert_close(variable.value(), alone.value())
    torch.testing.assert_close(other.value(), another.value())


def test_what_a_function_does_after_a_step_sees_the_new_values(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> list[Any]:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        kind, gradient = type(model.weight).__name__, model.weight.grad.tolist()
        seen = model.weight.detach().clone(), torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        return [kind, gradient, *(value.tolist() for value in seen), type(model.weight).__name__]

    assert c.coordinator.schedule(step).fetch() == [
        "OutdatedParameter", [[1.0, 1.0]], [[0.5, 0.5]], [0.5, 0.5], "Parameter"
    ]  # fmt: skip


def test_two_models_that_learn_from_each_other_in_one_function(cluster: Any) -> None:
    def build_both() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Linear(2, 3), nn.Linear(3, 1)

    def both_learn(makes: nn.Module, judges: nn.Module, made: Any, judged: Any) -> None:
        for number in range(2):
            noise = batch(number, 2)
            judged.zero_grad()
            (judges(makes(noise).detach()).square().mean() - judges(noise.new_ones(8, 3)).mean()).backward()
            judged.step()
            made.zero_grad()
            judges(makes(noise)).mean().backward()
            made.step()

    def optimizers_of(models: tuple[nn.Module, nn.Module]) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]

    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        models = build_both()
    optimizers, alone = optimizers_of(models), build_both()
    c.coordinator.schedule(lambda: both_learn(*models, *optimizers))
    c.coordinator.join(timeout=30)
    both_learn(*alone, *optimizers_of(alone))
    for ours, theirs in zip(models, alone, strict=True):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_a_function_may_put_back_what_it_changed(cluster: Any) -> None:
    """Sharpness-aware minimization, and an evaluation with other weights."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()

    for number in range(7):
        c.coordinator.schedule(step, args=(number,))
    c.coordinator.join(timeout=30)


def test_settings_of_optimizers_are_the_coordinators(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()

    c.coordinator.schedule(step)
    with pytest.raises(RuntimeError, match=r"changed settings of SGD: 'lr' from 0\.1 to 0\.01"):
        c.coordinator.join(timeout=30)


def test_parameters_of_optimizers_are_those_that_the_servers_know(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()

    c.coordinator.schedule(step)
    c.coordinator.join(timeout=30)
    with c.strategy.scope():
        more = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(more.parameters())})
    with pytest.raises(ValueError, match="have changed since the parameter servers were told"):
        c.coordinator.schedule(step)
    elsewhere = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"shape \(1, 2\) that is not on the parameter servers"):
        c.coordinator.schedule(lambda: elsewhere.step())


def test_what_is_frozen_stays_as_it_is(cluster: Any) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> bool:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.requires_grad

    def moves(trains: bool) -> bool:
        model.weight.requires_grad_(trains)
        before = model.weight.detach().clone()
        done = [c.coordinator.schedule(step, worker=worker) for worker in (0, 1)]
        assert c.coordinator.fetch(done) == [trains, trains]
        return not torch.equal(before, model.weight.detach())

    c.await_workers()
    assert [moves(trains) for trains in (True, False, True, False)] == [True, False, True, False]


def test_a_buffer_that_becomes_something_else_is_refused(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = Net()

    def grow() -> None:
        model.mean = torch.zeros(5)

    c.coordinator.schedule(grow)
    with pytest.raises(RuntimeError, match=r"shape \(5,\) of the buffer 'mean' of Net"):
        c.coordinator.join(timeout=30)


def test_a_model_among_the_arguments(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = build()
    alone = build()

    def forward(given: nn.Module) -> None:
        given(batch(0))

    for _ in range(2):
        c.coordinator.schedule(forward, args=(model,))
        c.coordinator.join(timeout=30)
        alone(batch(0))
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()))


def test_a_function_that_fails_leaves_nothing_in_parameters(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def fail() -> None:
        model.weight.data.mul_(2)
        raise OSError("no data")

    c.coordinator.schedule(fail)
    with pytest.raises(OSError, match="no data"):
        c.coordinator.join(timeout=30)
    assert torch.equal(c.coordinator.schedule(lambda: model.weight.detach().clone()).get(), before)


@pytest.mark.parametrize("in_run", [False, True])
def test_writes_to_variables_in_functions(cluster: Any, in_run: bool) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        variable, count = tfd.Variable(torch.ones(2, 2)), tfd.Variable(0, dtype=torch.int64)

    def step() -> None:
        variable.data.mul_(3)
        with torch.no_grad():
            variable[0].add_(1)
            variable.sub_(torch.tensor([0.0, 1.0]))
            variable[1] = 7.0
            variable.add_(variable)

    def both() -> None:
        c_strategy.run(step) if in_run else step()

    c_strategy = c.strategy
    c.coordinator.schedule(both)
    c.coordinator.join(timeout=30)
    assert variable.detach().tolist() == [[8.0, 6.0], [14.0, 14.0]]
    with pytest.raises(RuntimeError, match="can't be cast"):
        count += 0.5
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        variable += 1.0
    assert variable.detach().tolist() == [[8.0, 6.0], [14.0, 14.0]]


def test_sums_of_several_workers_are_all_counted(cluster: Any) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        count = tfd.Variable(0, dtype=torch.int64)

    def step() -> None:
        nonlocal count
        count += 2
        count.sub_(1)

    c.await_workers()
    for _ in range(300):
        c.coordinator.schedule(step)
    c.coordinator.join(timeout=60)
    assert int(count) == 300
