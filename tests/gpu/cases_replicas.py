"""Replicas of one process on devices: the same numbers as on the CPU. Run by ``check.py`` and on pretend devices.

The rows G1 to G15 are the ways in which a program that is right on the CPU was wrong on GPUs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from device_kind import KIND
from on_replicas import (
    ACCELERATOR,
    CLOSE,
    CPU,
    assert_as_on_the_cpu,
    built,
    inputs,
    on_all,
    on_devices,
    plain_loss,
    several,
    three_layers,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "20")  # what waits for ever fails


class ScaledByAll(torch.autograd.Function):
    """A function whose backward asks the other replicas."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        replica = td.get_replica_context()
        return grad * replica.all_reduce("SUM", torch.full((1,), 1.0 + replica.local_replica_id, device=grad.device))


def _checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model[2](checkpoint(model[1], model[0](x), use_reentrant=False)) ** 2).sum()


def _reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model[2](checkpoint(model[1], model[0](x), use_reentrant=True)) ** 2).sum()


def _asks_in_backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model[2](ScaledByAll.apply(model[1](model[0](x)))) ** 2).sum()  # type: ignore[no-untyped-call]


def _gathers(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (td.get_replica_context().all_gather(model(x), 0) ** 2).sum()


def _asks_in_recomputation(model: Any, x: torch.Tensor) -> torch.Tensor:
    def part(h: torch.Tensor) -> torch.Tensor:
        mean = td.get_replica_context().all_reduce("MEAN", h.detach().mean().reshape(1))
        return model[1](h) * mean

    return (model[2](checkpoint(part, model[0](x), use_reentrant=False)) ** 2).sum()


@on_devices
@pytest.mark.parametrize(
    "loss", [plain_loss, _checkpointed, _reentrant, _asks_in_backward, _gathers, _asks_in_recomputation]
)
def test_g1_g2_g3_backward_is_the_replicas_own(devices: list[str], loss: Any) -> None:
    assert_as_on_the_cpu(devices, three_layers, loss)


@on_devices
def test_g3_batch_norm_in_a_checkpoint(devices: list[str]) -> None:
    def statistics(devices: Sequence[str]) -> list[torch.Tensor]:
        with td.MirroredStrategy(devices) as strategy:
            model: Any = built(strategy, lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))

            def step(x: torch.Tensor) -> torch.Tensor:
                (checkpoint(model, x, use_reentrant=False) ** 2).sum().backward()
                return model[1].running_mean.clone()

            return [
                t.cpu() for t in strategy.experimental_local_results(strategy.run(step, (on_all(strategy, inputs),)))
            ]

    found, expected = statistics(devices), statistics(CPU)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not torch.equal(found[0], found[1])


@on_devices
def test_g4_what_is_built_in_the_scope_is_on_the_device(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            shared = nn.Parameter(torch.ones(2))
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            model[0].register_parameter("shared", shared)
            variable = td.Variable(1.0)
            frozen = nn.Linear(2, 2).requires_grad_(False)
            copied = copy.deepcopy(model)
        assert {p.device for p in (*model.parameters(), *model.buffers())} == {torch.device(f"{KIND}:0")}
        assert {p.device for p in (*frozen.parameters(), *copied.parameters())} == {torch.device(f"{KIND}:0")}
        assert model[0].shared is shared
        assert not frozen.weight.requires_grad
        where = strategy.run(lambda: (model[0].weight.clone(), model[1].running_mean.clone(), variable + 0))
        for value in where:
            locals_ = strategy.experimental_local_results(value)
            assert [t.device for t in locals_] == [strategy.worker.torch_device(r) for r in range(2)]


@on_devices
def test_g4_what_is_adopted_or_gets_its_shape_later(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        outside = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(outside.parameters(), 0.1)
        strategy.experimental_adopt(outside)
        with strategy.scope():
            lazy = nn.LazyLinear(2)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            lazy(outside(x)).sum().backward()
            optimizer.step()
            return outside[0].weight.detach().clone()

        first, second = strategy.experimental_local_results(strategy.run(step, args=(on_all(strategy, inputs),)))
        assert torch.equal(first.cpu(), second.cpu())
        assert {t.device.type for t in (*outside.parameters(), *outside.buffers(), *lazy.parameters())} == {KIND}


def test_g4_one_replica() -> None:
    last = torch.device(KIND, min(ACCELERATOR.device_count(), 2) - 1)
    with td.OneDeviceStrategy(str(last)) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 2)
        assert model.weight.device == last
        assert strategy.run(lambda: torch.ones(1, device=KIND).device) == last  # G6
    outside = nn.Linear(2, 2)
    assert outside.weight.device.type == "cpu"


@on_devices
def test_g4_the_loop_of_the_readme(devices: list[str]) -> None:
    def losses(devices: Sequence[str]) -> list[float]:
        with td.MirroredStrategy(devices) as strategy:
            model = built(strategy, lambda: nn.Linear(3, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            data = [(inputs(n, 6), inputs(n + 9, 6, 1)) for n in range(4)]

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                return loss.detach()

            return [
                float(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None))
                for batch in strategy.experimental_distribute_dataset(data)
            ]

    assert losses(devices) == pytest.approx(losses(CPU), rel=CLOSE["rtol"])


@several
def test_g6_the_current_device_is_the_replicas_own() -> None:
    """The first replica's too, which runs in the caller's thread; what the caller had is current again afterwards."""
    places = [f"{KIND}:1", f"{KIND}:0"]
    before = ACCELERATOR.current_device()
    with td.MirroredStrategy(places) as strategy:

        def where() -> list[str]:
            layer = nn.Linear(1, 1).to(KIND)
            return [str(t.device) for t in (torch.ones(1, device=KIND), layer.weight, layer(layer.weight))]

        found = strategy.experimental_local_results(strategy.run(where))
        with strategy.scope():
            variable = td.Variable([1.0])
        update = strategy.extended.update(
            variable, lambda copy: (copy + torch.ones(1, device=KIND)).device, group=False
        )
    assert [list(devices) for devices in found] == [[place] * 3 for place in places]
    assert list(map(str, update)) == places
    assert ACCELERATOR.current_device() == before


@several
@pytest.mark.parametrize("slots", ["", "#0", "#1"], ids=["one replica", "one device", "two devices"])
def test_g6_in_the_scope_the_first_device_is_the_current_one(slots: str) -> None:
    """What is made there on a device without a number, by a default device or Keras, is where its replicas compute."""
    places = (
        [f"{KIND}:1"] if not slots else [f"{KIND}:1#0", f"{KIND}:1#1"] if slots == "#0" else [f"{KIND}:1", f"{KIND}:0"]
    )
    with td.MirroredStrategy(places) as strategy:
        with strategy.scope(), torch.device(KIND):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            shift = td.Variable(torch.ones(2))
        assert {str(t.device) for t in (*model.parameters(), *model.buffers())} == {f"{KIND}:1"}
        assert ACCELERATOR.current_device() == 0
        for batch in strategy.experimental_distribute_dataset([torch.ones(4, 2)]):
            made = strategy.run(lambda x: model(x) + shift, args=(batch,))
        where = [t.device for t in strategy.experimental_local_results(made)]
        assert where == [strategy.worker.torch_device(number) for number in range(len(places))]


@on_devices
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_g7_a_recurrent_net_that_is_moved(devices: list[str], kind: Any) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kind(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x[None])[0]  # type: ignore[no-any-return]

    assert_as_on_the_cpu(devices, Last, plain_loss)

    def moved() -> nn.Module:
        made = Last().to(f"{KIND}:0")
        made.net.flatten_parameters()
        return made

    torch.testing.assert_close(train(devices, moved, plain_loss), train(CPU, Last, plain_loss), **CLOSE)


@on_devices
def test_g9_a_batch_is_read_after_it_was_copied(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        data = [torch.full((4, 2), float(n)) for n in range(5)]
        read = [
            [float(t.sum()) for t in strategy.experimental_local_results(strategy.run(lambda x: x * 1, args=(batch,)))]
            for batch in strategy.experimental_distribute_dataset(data)
        ]
    assert read == [[4.0 * n] * 2 for n in range(5)]


@on_devices
def test_g11_each_replica_draws_on_its_device(devices: list[str]) -> None:
    def drawn() -> list[list[float]]:
        torch.manual_seed(7)
        with td.MirroredStrategy(devices) as strategy:
            runs = [strategy.run(lambda: torch.rand(3, device=KIND)) for _ in range(3)]
            return [[t.cpu().tolist() for t in strategy.experimental_local_results(run)] for run in runs]

    first = drawn()
    assert first == drawn()
    assert len({str(row) for run in first for row in run}) == 6


@on_devices
def test_g13_all_replicas_work_on_the_callers_stream(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = three_layers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = on_all(strategy, inputs)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            plain_loss(model, x).backward()
            optimizer.step()
            return torch.tensor(ACCELERATOR.current_stream().stream_id)

        sides = [ACCELERATOR.Stream(d) for d in sorted({d.partition("#")[0] for d in devices})]
        for side in sides:
            side.wait_stream(ACCELERATOR.current_stream(side.device))
        with contextlib.ExitStack() as stack:
            for side in reversed(sides):
                stack.enter_context(ACCELERATOR.stream(side))
            used = strategy.experimental_local_results(strategy.run(step, args=(x,)))
        assert [int(number) for number in used] == [sides[0].stream_id, sides[-1].stream_id]


def test_g15_sums_between_devices_have_the_bits_of_one() -> None:
    from tfstyle_dist.gradients.exchanges.between_devices import average_over_devices

    shapes = [(3, 5), (7,), (1,), (0,), (2, 2, 2), (64,), (0, 3)]
    for count in (2, 3, 4):
        for limit in (0, 1, 100):
            made = [[torch.randn(s, generator=torch.Generator().manual_seed(r)) for s in shapes] for r in range(count)]
            expected = [sum(column[1:], column[0]) / count for column in zip(*made, strict=True)]
            places = [f"{KIND}:{r % ACCELERATOR.device_count()}" for r in range(count)]
            there = [[t.to(place) for t in row] for place, row in zip(places, made, strict=True)]
            average_over_devices(there, 0, limit)
            for row in there:
                for found, value in zip(row, expected, strict=True):
                    assert torch.equal(found.cpu(), value)


def test_g15_some_parameters_are_kept_on_the_cpu() -> None:
    """As a large table is, by ``model.table.cpu()`` outside of steps."""
    from tfstyle_dist.gradients.exchanges.between_devices import average_over_devices

    places = [f"{KIND}:0", f"{KIND}:{ACCELERATOR.device_count() - 1}"]
    rows = [
        [torch.full((3,), r + k, dtype=torch.float32, device="cpu" if k % 3 else place) for k in range(7)]
        for r, place in enumerate(places)
    ]
    average_over_devices(rows, 0)
    for place, row in zip(places, rows, strict=True):
        assert [g.tolist() for g in row] == [[k + 0.5] * 3 for k in range(7)]
        assert [str(g.device) for g in row] == ["cpu" if k % 3 else place for k in range(7)]


@on_devices
def test_a_device_that_an_object_names_is_the_replicas_own(devices: list[str]) -> None:
    """As metrics of torchmetrics know where their counts are, and modules where their inputs are to go."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.here, self.there = nn.Linear(3, 1), torch.device(KIND, 0), [torch.device("cpu")]
            self.count = torch.zeros(1, device=self.here)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += torch.tensor([len(x)], device=self.here)
            return self.layer(x.to(self.here))  # type: ignore[no-any-return]

    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = Counting()

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert model.there == [torch.device("cpu")]
            return model(x), model.count * 1

        for count in (1, 2):
            made = strategy.run(step, args=(on_all(strategy, inputs),))
            for value in made:
                where = [t.device for t in strategy.experimental_local_results(value)]
                assert where == [strategy.worker.torch_device(number) for number in range(2)]
            assert [float(t) for t in strategy.experimental_local_results(made[1])] == [4.0 * count] * 2
        assert model.here == torch.device(KIND, 0)


@on_devices
@pytest.mark.parametrize("write", ["average", "list", "unscaled"])
def test_writes_to_lists_between_runs_reach_all_replicas(devices: list[str], write: str) -> None:
    """One kernel of a device writes to all tensors of a list, and need not count up their versions."""

    def values(devices: Sequence[str]) -> list[torch.Tensor]:
        with td.MirroredStrategy(devices) as strategy:
            model = built(strategy, three_layers)
            average = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
            )
            parameters = list(model.parameters())

            def read() -> list[torch.Tensor]:
                return [p.detach().clone() for p in (*parameters, *average.parameters())]

            strategy.run(read)
            for factor in (0.5, 3.0):
                lists = [p.detach() for p in parameters]
                if write == "average":
                    torch._foreach_mul_(lists, factor)
                    average.update_parameters(model)
                elif write == "list":
                    torch._foreach_lerp_(lists, [torch.ones_like(p) for p in lists], factor)
                else:
                    here = lists[0].device
                    found, scale = torch.zeros(1, device=here), torch.full((1,), factor, device=here)
                    torch._amp_foreach_non_finite_check_and_unscale_(lists, found, scale)
                kept = strategy.run(read)
            columns = [strategy.experimental_local_results(value) for value in kept]
            for first, second in columns:
                assert torch.equal(first.cpu(), second.cpu())
            return [first.cpu() for first, _ in columns]

    torch.testing.assert_close(values(devices), values(CPU), **CLOSE)
    assert not hasattr(torch._foreach_mul_, "__wrapped__")
