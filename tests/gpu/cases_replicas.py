"""Replicas of one process on devices: the same numbers as on the CPU. Run by ``check.py`` and on pretend devices.

The rows G1 to G15 are the ways in which a program that is right on the CPU was wrong on GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_kind import KIND, load_kind
from torch import nn
from torch.utils.checkpoint import checkpoint

import tfstyle_dist as td

ACCELERATOR = load_kind()
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),  # torch's own fallback
]
CPU = ["cpu:0", "cpu:1"]
ONE, TWO = [f"{KIND}:0#0", f"{KIND}:0#1"], [f"{KIND}:0", f"{KIND}:1"]
several = pytest.mark.skipif(ACCELERATOR.device_count() < 2, reason="needs two devices")
on_devices = pytest.mark.parametrize(
    "devices", [pytest.param(ONE, id="one device"), pytest.param(TWO, id="two devices", marks=several)]
)
# On the pretend accelerator the CPU computes; a real one rounds in another order.
CLOSE: dict[str, float] = {"rtol": 1e-6, "atol": 1e-7} if KIND == "pretend" else {"rtol": 1e-3, "atol": 1e-4}
LOOSER: dict[str, float] = {key: limit * 10 for key, limit in CLOSE.items()}


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "20")  # what waits for ever fails


def on_all(strategy: td.Strategy, make: Callable[[int], torch.Tensor]) -> Any:
    """A value for each replica, made on the CPU, on the replica's device."""

    def place(context: td.experimental.ValueContext) -> torch.Tensor:
        number = context.replica_id_in_sync_group
        return make(number).to(strategy.worker.torch_device(number))

    return strategy.experimental_distribute_values_from_function(place)


def inputs(number: int, rows: int = 4, width: int = 3) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number)) + number


def train(
    devices: Sequence[str],
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    steps: int = 3,
    make: Callable[[int], torch.Tensor] = inputs,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, 0.05),
) -> list[torch.Tensor]:
    """What replicas have after some steps, which must be the same on all of them: parameters, buffers."""
    with td.MirroredStrategy(devices) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = build()
        update = optimizer(model.parameters())

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            update.zero_grad()
            loss(model, x).backward()
            update.step()
            return [p.detach().clone() for p in model.parameters()]

        x = on_all(strategy, make)
        for _ in range(steps):
            found = strategy.run(step, args=(x,))
        columns = [strategy.experimental_local_results(value) for value in found]
        for first, second in columns:
            assert torch.equal(first.cpu(), second.cpu())
        return [first.cpu() for first, _ in columns]


def assert_as_on_the_cpu(devices: Sequence[str], *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(train(devices, *args, **kwargs), train(CPU, *args, **kwargs), **CLOSE)


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


class ScaledByAll(torch.autograd.Function):
    """A function whose backward asks the other replicas."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        replica = td.get_replica_context()
        return grad * replica.all_reduce("SUM", torch.full((1,), 1.0 + replica.local_replica_id, device=grad.device))


def _plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum()


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
    "loss", [_plain, _checkpointed, _reentrant, _asks_in_backward, _gathers, _asks_in_recomputation]
)
def test_g1_g2_g3_backward_is_the_replicas_own(devices: list[str], loss: Any) -> None:
    assert_as_on_the_cpu(devices, three_layers, loss)


@on_devices
def test_g3_batch_norm_in_a_checkpoint(devices: list[str]) -> None:
    def statistics(devices: Sequence[str]) -> list[torch.Tensor]:
        with td.MirroredStrategy(devices) as strategy:
            torch.manual_seed(0)
            with strategy.scope():
                model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

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
            torch.manual_seed(0)
            with strategy.scope():
                model = nn.Linear(3, 1)
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


@on_devices
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_g7_a_recurrent_net_that_is_moved(devices: list[str], kind: Any) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kind(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x[None])[0]  # type: ignore[no-any-return]

    assert_as_on_the_cpu(devices, Last, _plain)

    def moved() -> nn.Module:
        made = Last().to(f"{KIND}:0")
        made.net.flatten_parameters()
        return made

    torch.testing.assert_close(train(devices, moved, _plain), train(CPU, Last, _plain), **CLOSE)


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
            _plain(model, x).backward()
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
    from tfstyle_dist.gradients.exchanges.between_devices import sum_over_devices

    shapes = [(3, 5), (7,), (1,), (0,), (2, 2, 2), (64,), (0, 3)]
    for count in (2, 3, 4):
        for limit in (0, 1, 100):
            made = [[torch.randn(s, generator=torch.Generator().manual_seed(r)) for s in shapes] for r in range(count)]
            expected = [sum(column[1:], column[0]) / count for column in zip(*made, strict=True)]
            places = [f"{KIND}:{r % ACCELERATOR.device_count()}" for r in range(count)]
            there = [[t.to(place) for t in row] for place, row in zip(places, made, strict=True)]
            sum_over_devices(there, 0, limit)
            for row in there:
                for found, value in zip(row, expected, strict=True):
                    assert torch.equal(found.cpu(), value)


@on_devices
@pytest.mark.parametrize(
    "kind", ["sgd", "adamw", "foreach", "clip", "accumulate", "unused", "scaler", "overflow", "bf16"]
)
def test_steps_of_every_kind(devices: list[str], kind: str) -> None:
    def weights(devices: Sequence[str]) -> list[torch.Tensor]:
        with td.MirroredStrategy(devices) as strategy:
            torch.manual_seed(0)
            where = devices[0].partition(":")[0]
            with strategy.scope():
                model = three_layers()
                optimizer: Any = {
                    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
                    "foreach": lambda p: torch.optim.Adam(p, 0.05, foreach=True),
                }.get(kind, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))(model.parameters())
                scaler = torch.amp.GradScaler(where, enabled=kind in ("scaler", "overflow"), init_scale=8.0)

            def loss(x: torch.Tensor) -> torch.Tensor:
                if kind == "unused" and td.get_replica_context().local_replica_id == 1:
                    return (model[0](x) ** 2).sum()
                with torch.autocast(where, torch.bfloat16, enabled=kind == "bf16"):
                    return (model(x).float() ** 2).sum()

            def step(x: torch.Tensor, number: int) -> torch.Tensor:
                optimizer.zero_grad()
                if kind == "overflow" and number == 1 and td.get_replica_context().local_replica_id == 1:
                    x = x * torch.inf
                if kind == "accumulate":
                    with strategy.accumulate():
                        loss(x * 2).backward()
                scaler.scale(loss(x)).backward()
                if kind == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                return torch.tensor(scaler.get_scale())

            x = on_all(strategy, inputs)
            for number in range(3):
                scales = strategy.experimental_local_results(strategy.run(step, args=(x, number)))
                scale = {"scaler": 8.0, "overflow": 4.0 if number else 8.0}.get(kind, 1.0)
                assert [float(value) for value in scales] == [scale] * 2  # a step that overflows is left out by all
            each = strategy.run(lambda: [p.detach().clone() for p in model.parameters()])
            columns = [strategy.experimental_local_results(value) for value in each]
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in columns)
            return [a.cpu() for a, _ in columns]

    torch.testing.assert_close(weights(devices), weights(CPU), **LOOSER)


@pytest.mark.parametrize("home", ["cpu:0", f"{KIND}:0"])
@on_devices
def test_central_storage(devices: list[str], home: str) -> None:
    def weights(devices: Sequence[str], home: str) -> list[torch.Tensor]:
        with td.experimental.CentralStorageStrategy(devices, home) as strategy:
            torch.manual_seed(0)
            with strategy.scope():
                model = three_layers()
                optimizer = torch.optim.Adam(model.parameters(), 0.05)

            def step(x: torch.Tensor) -> None:
                optimizer.zero_grad()
                _plain(model, x).backward()
                optimizer.step()

            for _ in range(3):
                strategy.run(step, args=(on_all(strategy, inputs),))
            assert {p.device.type for p in model.parameters()} == {home.partition(":")[0]}
            return [p.detach().cpu() for p in model.parameters()]

    torch.testing.assert_close(weights(devices, home), weights(CPU, "cpu:0"), **LOOSER)


@on_devices
def test_save_and_restore(devices: list[str], tmp_path: Any) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = three_layers()
            optimizer = torch.optim.Adam(model.parameters(), 0.05)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            _plain(model, x).backward()
            optimizer.step()

        x = on_all(strategy, inputs)
        strategy.run(step, args=(x,))
        saved = td.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
        kept = io.BytesIO()
        torch.save(model.state_dict(), kept)
        strategy.run(step, args=(x,))
        after = [p.detach().cpu() for p in model.parameters()]
        td.train.Checkpoint(model=model, optimizer=optimizer).restore(saved)
        strategy.run(step, args=(x,))
        for parameter, value in zip(model.parameters(), after, strict=True):
            assert torch.equal(parameter.detach().cpu(), value)
        kept.seek(0)
        model.load_state_dict(torch.load(kept))
        each = strategy.run(lambda: model[0].weight.detach().clone())
        first, second = strategy.experimental_local_results(each)
        assert torch.equal(first.cpu(), second.cpu())
        assert not torch.equal(first.cpu(), after[0])


@on_devices
def test_variables_and_reductions(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            total = td.Variable(
                0.0, synchronization=td.VariableSynchronization.ON_READ, aggregation=td.VariableAggregation.SUM
            )

        def step(x: torch.Tensor) -> torch.Tensor:
            total.assign_add(x.sum())
            return td.get_replica_context().all_reduce("SUM", x)

        result = strategy.run(step, args=(on_all(strategy, lambda n: torch.full((2,), n + 1.0)),))
        assert [t.cpu().tolist() for t in strategy.experimental_local_results(result)] == [[3.0, 3.0]] * 2
        assert float(total.read_value()) == 6.0
        assert strategy.reduce("MEAN", result, axis=None).cpu().tolist() == [3.0, 3.0]
        assert strategy.gather(result, 0).cpu().tolist() == [3.0] * 4
        assert float(strategy.reduce("SUM", strategy.run(lambda: torch.ones(())), axis=None)) == 2.0  # of the CPU


@pytest.mark.parametrize("own", [None, lambda values: torch.stack(list(values)).sum(0)], ids=["default", "own sum"])
@on_devices
def test_what_replicas_give_from_their_own_devices_is_summed_on_one(devices: list[str], own: Any) -> None:
    with td.MirroredStrategy(devices, td.ReductionToOneDevice(accumulation_fn=own)) as strategy:
        with strategy.scope():
            summed, apart = td.Variable([3.0, 4.0], aggregation=td.VariableAggregation.SUM), td.Variable([1.0, 2.0])
        optimizer = td.train.GradientDescentOptimizer(1.0)

        def step(x: torch.Tensor) -> None:
            optimizer.apply_gradients([(x, summed)])
            apart.scatter_add(td.IndexedSlices(x, torch.tensor([1, 0], device=x.device)))

        x = on_all(strategy, lambda n: torch.tensor([1.0, 2.0 + n]))
        strategy.run(step, args=(x,))
        assert [t.tolist() for t in strategy.experimental_local_results(summed)] == [[1.0, -1.0]] * 2
        assert [t.tolist() for t in strategy.experimental_local_results(apart)] == [[3.0, 3.0], [4.0, 3.0]]
        assert strategy.reduce("SUM", x, axis=None).tolist() == [2.0, 5.0]


def test_a_device_that_is_not_there() -> None:
    seen = f"{KIND}:99 was asked for, but this process sees {ACCELERATOR.device_count()} {KIND.upper()} device"
    with pytest.raises(ValueError, match=seen):
        td.MirroredStrategy([f"{KIND}:99"])
