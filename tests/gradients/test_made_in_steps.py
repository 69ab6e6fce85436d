"""Parameters that come into being in a step: layers that the first forward builds, and parameters in others' places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from two_replicas import (
    assert_all_close,
    both_process_models,
    built,
    examples,
    flat_weights,
    half,
    mse,
    on_all,
    plain,
    replica,
    weights,
)

import tfstyle_dist as td


class BuiltByForward(nn.Module):
    """Its last layer is made for the features that it sees first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 4), None

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.first(x))
        if self.last is None:
            self.last = nn.Linear(x.shape[1], 1).double()
            nn.init.constant_(self.last.weight, 0.3)
            nn.init.zeros_(self.last.bias)
        return self.last(x)


class Replaced(nn.Module):
    """Each call puts another parameter in the place of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = nn.Parameter(self.weight.detach() * 0.99)
        return nn.functional.linear(x, self.weight)


class Drawn(nn.Module):
    """Its layer is drawn anew on each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(10)), None

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.scale
        if self.layer is None:
            context = td.get_replica_context()
            torch.manual_seed(0 if context is None else context.replica_id_in_sync_group)
            self.layer = nn.Linear(10, 1).double()
        return self.layer(x)


class Trainer:
    """Makes its optimizer when the model is whole, and looks the parameters up in each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, None

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], passes: int = 1) -> None:
        for _ in range(passes):
            loss = mse(self.model, batch) / passes
            loss.backward()
        parameters = list(self.model.parameters())
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.optimizer.param_groups[0]["params"] = parameters
        self.optimizer.step()
        self.optimizer.zero_grad()


def _assert_as_on_one_device(strategy: td.Strategy, build: Any, passes: int = 1) -> None:
    model, reference = built(strategy, build), plain(build)
    trainer, expected = Trainer(model), Trainer(reference)
    for step in range(4):
        strategy.run(lambda step=step: trainer.step(half(step), passes))
        expected.step(examples(step), passes)
        assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_a_layer_that_forward_builds_is_trained(strategy: td.Strategy, process_model: str) -> None:
    """Its gradient was divided by the number of replicas, as if no other replica had one."""
    _assert_as_on_one_device(strategy, BuiltByForward)


@both_process_models
def test_gradients_of_two_passes_are_added(strategy: td.Strategy, process_model: str) -> None:
    _assert_as_on_one_device(strategy, BuiltByForward, passes=2)


@both_process_models
def test_a_parameter_is_replaced_in_each_step(strategy: td.Strategy, process_model: str) -> None:
    _assert_as_on_one_device(strategy, Replaced)


@pytest.mark.distributed(workers=2)
def test_two_workers_of_two_replicas() -> None:
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        model, reference = built(strategy, BuiltByForward), plain(BuiltByForward)
        trainer, expected = Trainer(model), Trainer(reference)

        def quarter(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            context = td.get_replica_context()
            assert context is not None
            x, y = examples(step)
            begin = 2 * context.replica_id_in_sync_group
            return x[begin : begin + 2], y[begin : begin + 2]

        for step in range(3):
            strategy.run(lambda step=step: trainer.step(quarter(step)))
            expected.step(examples(step))
            for own in weights(strategy, model):
                torch.testing.assert_close(own, flat_weights(reference))


@both_process_models
def test_replicas_go_on_with_the_first_ones_values(
    strategy: td.Strategy, process_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As workers do, which are given the first worker's values when the next run begins; so nothing drifts."""
    model = built(strategy, Drawn)
    trainer = Trainer(model)
    for step in range(3):
        strategy.run(lambda step=step: trainer.step(half(step)))
    one, *others = weights(strategy, model)
    for other in others:
        torch.testing.assert_close(other, one, rtol=0.0, atol=0.0)
    assert "has other values of the parameter" not in caplog.text


class Statistics(nn.Module):
    """Makes a layer that counts in its buffers, and one whose buffer is drawn once on each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm, self.drawn = nn.Parameter(torch.ones(10)), None, None

    def forward(self, x: torch.Tensor) -> Any:
        if self.norm is None:
            norm, drawn = nn.BatchNorm1d(10).double(), nn.Module()
            norm.register_buffer("largest", torch.zeros(10).double())
            drawn.register_buffer("projection", torch.full((10,), 1.0 + replica()).double())
            self.norm, self.drawn = norm, drawn
        self.norm.largest.copy_(torch.maximum(self.norm.largest, x.amax(0)))
        return self.norm(x * self.scale) * self.drawn.projection


@both_process_models
def test_statistics_of_a_layer_that_a_step_makes_stay_each_replicas_own(
    strategy: td.Strategy, process_model: str
) -> None:
    """Workers were given the first one's when the second run began; its other buffers, all replicas get."""
    model: Any = built(strategy, Statistics)

    def buffers() -> torch.Tensor:
        norm, projection = model.norm, model.drawn.projection
        return torch.cat([norm.running_mean, norm.running_var, norm.largest, projection])

    for step in range(3):
        strategy.run(lambda step=step: mse(lambda x: model(x).sum(1, keepdim=True), half(step)).backward())
    for number, own in enumerate(on_all(strategy, buffers)):
        norm, shares = nn.BatchNorm1d(10).double(), [examples(step)[0].chunk(2)[number] for step in range(3)]
        for share in shares:
            norm(share)
        begun = examples(0)[0].chunk(2)[0]  # the first one's, for all replicas
        largest = torch.cat([torch.zeros(1, 10), begun, *shares[1:]]).amax(0)
        expected = torch.cat([norm.running_mean, norm.running_var, largest, torch.ones(10)])
        torch.testing.assert_close(own, expected.double())


class DrawnOnce(nn.Module):
    """Makes a layer without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drawn = nn.Parameter(torch.ones(3)), None

    def forward(self, x: torch.Tensor) -> Any:
        if self.drawn is None:
            drawn = nn.Module()
            drawn.register_buffer("projection", x * (1.0 + replica()))
            self.drawn = drawn
        return x * self.scale * self.drawn.projection


@pytest.mark.cpu_only("the pretend accelerator does not compute in inference mode")
@both_process_models
def test_buffers_of_a_layer_that_is_made_in_inference_mode(strategy: td.Strategy, process_model: str) -> None:
    """What is drawn in the first call is the first replica's from the second run on."""
    model: Any = built(strategy, DrawnOnce)
    x = torch.ones(3, device=model.scale.device)
    step = torch.inference_mode()(lambda: model(x))
    for _ in range(2):
        strategy.run(step)
    assert on_all(strategy, lambda: model.drawn.projection.clone()).tolist() == [[1.0] * 3] * 2


@pytest.mark.distributed(workers=2)
def test_two_workers_of_two_replicas_keep_what_a_layer_has_counted() -> None:
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        model: Any = built(strategy, Statistics)
        for step in range(3):
            strategy.run(lambda step=step: model(examples(step)[0].chunk(4)[replica()]).sum().backward())
        norms = [nn.BatchNorm1d(10).double() for _ in range(4)]
        for step in range(3):
            for norm, share in zip(norms, examples(step)[0].chunk(4), strict=True):
                norm(share)
        expected = torch.stack([norm.running_mean for norm in norms])  # type: ignore[misc]
        torch.testing.assert_close(on_all(strategy, lambda: model.norm.running_mean), expected)
        assert on_all(strategy, lambda: model.drawn.projection).tolist() == [[1.0] * 10] * 4


@both_process_models
def test_accumulated_gradients_are_reduced_together(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, BuiltByForward), plain(BuiltByForward)

    def step() -> None:
        with strategy.accumulate():
            mse(model, half(0)).backward()
        mse(model, half(1)).backward()

    strategy.run(step)
    (mse(reference, examples(0)) + mse(reference, examples(1))).backward()
    for local in strategy.experimental_local_results(strategy.run(lambda: [p.grad for p in model.parameters()])):
        for own, expected in zip(local, reference.parameters(), strict=True):
            torch.testing.assert_close(own, expected.grad)


class Experts(nn.Module):
    """Makes layers of one look in the first call, and uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(10, 1), nn.ModuleList()

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> Any:
        for _ in range(2 - len(self.experts)):
            layer = nn.Linear(10, 1).double()
            nn.init.constant_(layer.weight, 0.1)
            self.experts.append(layer)
        return self.first(x).sum() + sum(self.experts[number](x).sum() for number in used)


def _experts(strategy: td.Strategy, model: nn.Module, uses: list[tuple[int, ...]]) -> list[Any]:
    """The gradients of both experts on each replica after a pass in which each uses others."""

    def step() -> list[torch.Tensor | None]:
        model.zero_grad()
        context = td.get_replica_context()
        assert context is not None
        number = context.replica_id_in_sync_group
        model(torch.full((1, 10), number + 1.0, dtype=torch.float64), uses[number]).backward()
        return [layer.weight.grad for layer in model.experts]  # type: ignore[union-attr,misc]

    return list(strategy.experimental_local_results(strategy.run(step)))


@pytest.mark.parametrize("uses", [[(0,), (1,)], [(1,), (0,)], [(0,), ()], [(), (0, 1)]])
def test_layers_of_one_look_that_replicas_use_at_different_times(uses: list[tuple[int, ...]]) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        model = built(strategy, Experts)
        for _ in range(2):
            for own in _experts(strategy, model, uses):
                for number, grad in enumerate(own):
                    total = sum(replica + 1.0 for replica in range(2) if number in uses[replica])
                    assert grad is None if total == 0 else grad.flatten().tolist() == [total / 2] * 10


def test_what_is_frozen_outside_stays_frozen_on_all_replicas() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        model = built(strategy, Experts)
        _experts(strategy, model, [(0, 1), (0, 1)])
        model.experts[0].weight.requires_grad_(False)
        for own in _experts(strategy, model, [(0, 1), (0, 1)]):
            assert own[0] is None
            assert own[1].flatten().tolist() == [1.5] * 10


@pytest.mark.distributed(workers=2)
def test_two_workers_of_two_replicas_use_a_layer_at_different_times() -> None:
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        model = built(strategy, Experts)
        for uses, mean in (([(), (), (0,), (0,)], 1.75), ([(0,)] * 4, 2.5)):
            for own in _experts(strategy, model, uses):
                assert own[0].flatten().tolist() == [mean] * 10


def test_one_copy_for_all_replicas_is_refused() -> None:
    strategy = td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    trainer = Trainer(built(strategy, BuiltByForward))
    with pytest.raises(RuntimeError, match=r"made the parameters weight, bias once in each replica.*scope"):
        strategy.run(lambda: trainer.step(half()))


class Grown(nn.Module):
    """Each step gives it more points, on each replica another number."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.ones(4))

    def step(self) -> None:
        more = 1 + td.get_replica_context().replica_id_in_sync_group
        self.points = nn.Parameter(torch.cat([self.points.detach(), torch.ones(more)]))
        (self.points * half()[0].sum()).sum().backward()


def test_one_copy_of_parameters_of_another_size_is_refused() -> None:
    strategy = td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    model = built(strategy, Grown)
    with pytest.raises(RuntimeError, match=r"made the parameters points once in each replica.*scope"):
        strategy.run(model.step)
