"""What the program writes between two runs reaches all replicas, also where the write leaves no trace on the tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd


@pytest.fixture
def strategy() -> Iterator[tfd.MirroredStrategy]:
    made = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()


def _on_each(strategy: tfd.MirroredStrategy, get: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What each replica has."""
    values = strategy.run(lambda: get().detach().clone())
    return strategy.experimental_local_results(values)


def _assert_equal(values: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["seeded", "drawn from", "set"])
def test_a_generator_that_was_written_to_goes_on_so_on_all_replicas(strategy: tfd.MirroredStrategy, how: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def step() -> torch.Tensor:
        return torch.rand(3, generator=generator)

    first, second = strategy.experimental_local_results(strategy.run(step))
    assert torch.equal(first, second)
    if how == "seeded":
        generator.manual_seed(7)
    elif how == "set":
        generator.set_state(torch.Generator().manual_seed(7).get_state())
    else:
        torch.rand(5, generator=generator)
    expected = torch.Generator()
    expected.set_state(generator.get_state())
    wanted = torch.rand(3, generator=expected)
    for own in strategy.experimental_local_results(strategy.run(step)):
        assert torch.equal(own, wanted)


def test_a_generator_that_nobody_wrote_to_keeps_the_states_of_the_replicas(strategy: tfd.MirroredStrategy) -> None:
    generator = torch.Generator().manual_seed(1)

    def step() -> torch.Tensor:
        replica = tfd.get_replica_context().replica_id_in_sync_group
        return torch.rand(1 + replica, generator=generator)[:1]

    strategy.run(step)
    strategy.run(lambda: generator is not None)
    first, second = strategy.experimental_local_results(strategy.run(step))
    reference = torch.rand(4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first, reference[1:2])
    assert torch.equal(second, reference[2:3])


@pytest.mark.parametrize(
    "norm",
    [
        lambda: torch.nn.BatchNorm1d(4),
        lambda: torch.nn.BatchNorm1d(4, momentum=None),
        lambda: torch.nn.InstanceNorm1d(4, track_running_stats=True),
        lambda: pytest.importorskip("torch.ao.quantization").FusedMovingAvgObsFakeQuantize(),
    ],
    ids=["batch norm", "cumulative", "instance norm", "fake quantization"],
)
def test_statistics_of_a_forward_pass_between_runs(
    strategy: tfd.MirroredStrategy, norm: Callable[[], torch.nn.Module]
) -> None:
    with strategy.scope():
        model = norm()
    x = torch.linspace(-3, 5, 40).reshape(2, 4, 5)
    strategy.run(lambda: model(x[:, :4]))
    for factor in (1.0, 2.0):
        model(x * factor)
        for name, buffer in model.named_buffers():
            _assert_equal(_on_each(strategy, lambda name=name: dict(model.named_buffers())[name]))
            torch.testing.assert_close(
                _on_each(strategy, lambda name=name: dict(model.named_buffers())[name])[0], buffer
            )


def test_statistics_without_a_counter(strategy: tfd.MirroredStrategy) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(4))
            self.register_buffer("running_var", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)

    with strategy.scope():
        model = Norm()
    for factor in (1.0, 2.0, 3.0):
        _on_each(strategy, lambda: model.running_mean)  # a run that uses the model
        model(torch.ones(2, 4) * factor + torch.tensor([[0.0], [1.0]]))
        _assert_equal(_on_each(strategy, lambda: model.running_mean))
        _assert_equal(_on_each(strategy, lambda: model.running_var))


def test_gradients_that_a_scaler_divides_between_runs(strategy: tfd.MirroredStrategy) -> None:
    """And what a fused optimizer's function writes to parameters: torch counts up no version for either."""
    with strategy.scope():
        layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    kind = layer.weight.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=8.0)

    def backward() -> None:
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()

    strategy.run(backward)
    scaler.unscale_(optimizer)
    assert [grad.tolist() for grad in _on_each(strategy, lambda: layer.weight.grad)] == [[[1.0, 1.0]]] * 2
    with torch.no_grad():
        layer.weight.fill_(2.0)
    _assert_equal(_on_each(strategy, lambda: layer.weight))
    if hasattr(torch, "_fused_sgd_") and kind != "pretend":
        torch._fused_sgd_(
            [layer.weight.detach()], [torch.ones(1, 2)], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        assert [weight.tolist() for weight in _on_each(strategy, lambda: layer.weight)] == [[[1.5, 1.5]]] * 2


@pytest.mark.parametrize("form", ["fused", "foreach", "plain"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_step_of_an_optimizer_between_runs(
    strategy: tfd.MirroredStrategy, kind: type[torch.optim.Optimizer], form: str
) -> None:
    options: dict[str, Any] = {"lr": 0.1} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    options |= {} if form == "plain" else {form: True}
    with strategy.scope():
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), **options)
    alone = copy.deepcopy(model)
    its = kind(alone.parameters(), **options)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)

    def step(of: torch.nn.Module = model, by: torch.optim.Optimizer = optimizer) -> None:
        by.zero_grad()
        of(x).square().mean().backward()
        by.step()

    step()  # outside of every run, and before the first one
    step(alone, its)
    for _ in range(3):
        strategy.run(step)
        step()
        step(alone, its)
        step(alone, its)
    optimizer, its = kind(model.parameters(), **options), kind(alone.parameters(), **options)
    for own, by in ((model, optimizer), (alone, its)):  # one that no run has seen
        step(own, by)
    for name, wanted in alone.named_parameters():
        for own in _on_each(strategy, lambda name=name: dict(model.named_parameters())[name]):
            torch.testing.assert_close(own, wanted)


class _Program:
    """Makes things in its first step and keeps them."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer: torch.optim.Optimizer | None = None
        self.kept: dict[str, Any] = {}
        self.x = torch.linspace(-1, 1, 12).reshape(4, 3)

    def step(self) -> torch.Tensor:
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.kept["teachers"] = [copy.deepcopy(self.model).requires_grad_(False)]
            self.kept["schedule"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.optimizer.zero_grad()
        teacher = self.kept["teachers"][0]
        for parameter in teacher.parameters():
            parameter.mul_(0.99)
        wanted = teacher(self.x) + 1
        loss = (self.model(self.x) - wanted).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _lower_rate(program: _Program) -> None:
    assert program.optimizer is not None
    for group in program.optimizer.param_groups:
        group["lr"] *= 0.1


def _schedule(program: _Program) -> None:
    program.kept["schedule"].step()


def _follow(program: _Program) -> None:
    with torch.no_grad():
        for old, new in zip(program.kept["teachers"][0].parameters(), program.model.parameters(), strict=True):
            old.lerp_(new, 0.3)


def _follow_and_note(program: _Program) -> None:
    _follow(program)
    program.kept["noted"] = [program.x * 2]


def _load_teacher(program: _Program) -> None:
    program.kept["teachers"][0].load_state_dict(program.model.state_dict())


def _edit_state(program: _Program) -> None:
    assert program.optimizer is not None
    for state in program.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5
        state["exp_avg_sq"].mul_(0.5)


def _clear_state(program: _Program) -> None:
    assert program.optimizer is not None
    program.optimizer.state.clear()


@pytest.mark.parametrize(
    "edit", [_lower_rate, _schedule, _follow, _follow_and_note, _load_teacher, _edit_state, _clear_state]
)
def test_what_a_step_made_is_changed_outside(strategy: tfd.MirroredStrategy, edit: Callable[[_Program], None]) -> None:
    with strategy.scope():
        torch.manual_seed(3)
        program = _Program()
    torch.manual_seed(3)
    alone = _Program()
    for _ in range(4):
        losses = strategy.experimental_local_results(strategy.run(program.step))
        wanted = alone.step()
        for own in losses:
            torch.testing.assert_close(own, wanted)
        edit(program)
        edit(alone)
    for name, wanted in alone.model.named_parameters():
        for own in _on_each(strategy, lambda name=name: dict(program.model.named_parameters())[name]):
            torch.testing.assert_close(own, wanted)


def test_what_each_replica_made_stays_its_own_until_somebody_writes_to_it(strategy: tfd.MirroredStrategy) -> None:
    program = _Program()

    def step() -> torch.Tensor:
        if "own" not in program.kept:
            program.kept["own"] = torch.nn.Linear(2, 2, bias=False)
            with torch.no_grad():
                program.kept["own"].weight.fill_(tfd.get_replica_context().replica_id_in_sync_group + 1.0)
        return program.kept["own"].weight.detach().sum()

    for _ in range(3):
        values = strategy.experimental_local_results(strategy.run(step))
        assert [float(value) for value in values] == [4.0, 8.0]
    with torch.no_grad():
        program.kept["own"].weight.mul_(3)
    values = strategy.experimental_local_results(strategy.run(step))
    assert [float(value) for value in values] == [12.0, 12.0]
    assert float(step()) == 12.0


class _Criterion:
    """A loss made of another one, with a gain that the program lowers after each epoch."""

    def __init__(self, inner: _Criterion | None) -> None:
        self.inner, self.gain = inner, 0.8
        if inner is None:
            self.loss = torch.nn.MSELoss()

    def update(self) -> None:
        self.gain /= 2


@pytest.mark.parametrize("around", [0, 1])
def test_a_loss_around_others_that_the_first_step_made_is_written_to_outside(
    strategy: tfd.MirroredStrategy, around: int
) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        model.criterion = None

    def step() -> torch.Tensor:
        if model.criterion is None:
            inner = _Criterion(None)
            model.criterion = _Criterion(inner) if around else inner
        return torch.tensor([model.criterion.gain, (model.criterion.inner or model.criterion).gain])

    strategy.run(step)
    model.criterion.update()
    values = strategy.experimental_local_results(strategy.run(step))
    assert [value.tolist() for value in values] == [pytest.approx([0.4, 0.8 if around else 0.4])] * 2
