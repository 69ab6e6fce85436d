"""Whole steps of local replicas on devices, and what lives longer than one. Run like ``cases_replicas.py``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device_kind import KIND
from on_replicas import (
    ACCELERATOR,
    CPU,
    LOOSER,
    ONE,
    TWO,
    built,
    inputs,
    on_all,
    on_devices,
    plain_loss,
    several,
    three_layers,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tfstyle_dist as td
from tfstyle_dist.checkpoint import dcp

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "20")  # what waits for ever fails


@on_devices
@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *((k, 3) for k in ("sgd", "adamw", "foreach", "clip", "accumulate", "unused", "scaler", "overflow")),
        *((k, 3) for k in ("bf16", "bf16 backward", "bf16 run")),
        *((k, 512) for k in ("foreach", "clip", "scaler", "zeros")),  # gradients that replicas on a CPU share at first
    ],
)
def test_steps_of_every_kind(devices: list[str], kind: str, width: int) -> None:
    def weights(devices: Sequence[str]) -> list[torch.Tensor]:
        with td.MirroredStrategy(devices) as strategy:
            where = devices[0].partition(":")[0]
            model: Any = built(strategy, lambda: three_layers() if width == 3 else nn.Linear(width, width))
            with strategy.scope():
                optimizer: Any = {
                    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
                    "foreach": lambda p: torch.optim.Adam(p, 0.05, foreach=True),
                }.get(kind, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))(model.parameters())
                scaler = torch.amp.GradScaler(where, enabled=kind in ("scaler", "overflow"), init_scale=8.0)

            def loss(x: torch.Tensor) -> torch.Tensor:
                if kind == "unused" and td.get_replica_context().local_replica_id == 1:
                    return (model[0](x) ** 2).sum()
                with autocast(kind == "bf16"):
                    return (model(x).float() ** 2).sum()

            def autocast(enabled: bool) -> Any:
                return torch.autocast(where, torch.bfloat16) if enabled else contextlib.nullcontext()

            def step(x: torch.Tensor, number: int) -> torch.Tensor:
                optimizer.zero_grad(set_to_none=kind != "zeros")
                if kind == "overflow" and number == 1 and td.get_replica_context().local_replica_id == 1:
                    x = x * torch.inf
                if kind == "accumulate":
                    with strategy.accumulate():
                        loss(x * 2).backward()
                with autocast(kind == "bf16 backward"):
                    scaler.scale(loss(x)).backward()
                if kind == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                return torch.tensor(scaler.get_scale())

            x = on_all(strategy, lambda number: inputs(number, width=width) / width)
            for number in range(3):
                with autocast(kind == "bf16 run"):
                    scales = strategy.experimental_local_results(strategy.run(step, args=(x, number)))
                scale = {"scaler": 8.0, "overflow": 4.0 if number else 8.0}.get(kind, 1.0)
                assert [float(value) for value in scales] == [scale] * 2  # a step that overflows is left out by all
            each = strategy.run(lambda: [p.detach().clone() for p in model.parameters()])
            columns = [strategy.experimental_local_results(value) for value in each]
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in columns)
            return [a.cpu() for a, _ in columns]

    torch.testing.assert_close(weights(devices), weights(CPU), **LOOSER)


def test_a_model_that_autocast_has_cast_is_adopted() -> None:
    model, x = three_layers(), torch.ones(2, 3)
    with td.MirroredStrategy(ONE) as strategy, torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
        strategy.experimental_adopt(model)
        assert {p.device.type for p in model.parameters()} == {KIND}


@on_devices
def test_large_gradients_are_each_replicas_own(devices: list[str]) -> None:
    """What one replica does to its gradients with CUDA's kernels for lists of tensors, the other one does not see."""
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            layer = nn.Linear(512, 512)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            layer(x).sum().backward()
            context = td.get_replica_context()
            assert not torch._C._is_cow_tensor(layer.weight.grad)
            norm = layer.weight.grad.norm()
            if context.local_replica_id == 0:
                nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            context.all_reduce("SUM", norm)  # the other replica has its turn
            return norm, layer.weight.grad.norm()

        before, after = strategy.run(step, args=(on_all(strategy, lambda n: torch.ones(2, 512)),))
        first, second = strategy.experimental_local_results(before)
        assert float(first) == float(second) > 100.0
        clipped, other = strategy.experimental_local_results(after)
        assert float(clipped) < 1.1
        assert float(other) == float(second)


@on_devices
def test_the_one_copy_is_evaluated_on_the_first_device(devices: list[str]) -> None:
    """As transformers' Trainer does, whose inputs are on its device, where the one copy of the parameters is not."""
    pytest.importorskip("accelerate")
    from tfstyle_dist.integrations.accelerate import wrappers

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.eval()
    x = inputs(0)
    with td.experimental.CentralStorageStrategy(devices) as strategy:
        outside = wrappers.LocalReplicas(model, strategy, divides=False)
        assert outside.is_elsewhere
        with torch.no_grad():
            found = outside(x.to(devices[0].partition("#")[0]))
    assert found.device == torch.device(f"{KIND}:0")
    torch.testing.assert_close(found.cpu(), model(x), **LOOSER)


@on_devices
def test_the_device_of_each_share_of_a_call_is_the_current_one(devices: list[str]) -> None:
    pytest.importorskip("accelerate")
    from tfstyle_dist.integrations.accelerate import wrappers

    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.ones(1, device=KIND)

    model, x = Shifted(3, 2), inputs(0)
    with td.MirroredStrategy(devices) as strategy:
        found = wrappers.LocalReplicas(model.to(f"{KIND}:0"), strategy)(x.to(f"{KIND}:0"))
    torch.testing.assert_close(found.cpu(), nn.Linear.forward(model.cpu(), x) + 1, **LOOSER)


@pytest.mark.parametrize("home", ["cpu:0", f"{KIND}:0"])
@on_devices
def test_central_storage(devices: list[str], home: str) -> None:
    def weights(devices: Sequence[str], home: str) -> list[torch.Tensor]:
        with td.experimental.CentralStorageStrategy(devices, home) as strategy:
            model = built(strategy, three_layers)
            optimizer = torch.optim.Adam(model.parameters(), 0.05)

            def step(x: torch.Tensor) -> None:
                optimizer.zero_grad()
                plain_loss(model, x).backward()
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
            plain_loss(model, x).backward()
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


class _Copies(TorchDispatchMode):
    """Copies that may be under way when they return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not (kwargs or {}).get("non_blocking"), func
        return func(*args, **(kwargs or {}))


@several
def test_a_checkpoint_has_what_another_device_than_the_current_one_computed(tmp_path: Path) -> None:
    """torch's writer waits for the current device alone, so nothing may be copied without waiting."""
    names, here = [f"{number:03}" for number in range(40)], ACCELERATOR.current_device()
    values = {name: torch.full((1 << 16,), float(name), device=f"{KIND}:{1 - here}") for name in names}
    busy = torch.ones(2048 if KIND != "pretend" else 8, device=f"{KIND}:{1 - here}").diag()
    for _ in range(50):
        busy = busy @ busy
    with _Copies():
        dcp.write_part(tmp_path / "part", {name: value + busy[0, 0] - 1 for name, value in values.items()})
    dcp.join_parts(tmp_path, ["part"])
    facts = {name: {"shape": [1 << 16], "dtype": "float32"} for name in names}
    for name, value in dcp.TensorReader(tmp_path, facts).read(names).items():
        assert torch.equal(value, torch.full((1 << 16,), float(name))), name


@on_devices
def test_random_numbers_of_devices_are_saved_and_restored(devices: list[str], tmp_path: Any) -> None:
    def drawn() -> list[list[float]]:
        run = strategy.run(lambda: torch.rand(3, device=KIND))
        return [t.cpu().tolist() for t in strategy.experimental_local_results(run)]

    with td.MirroredStrategy(devices) as strategy, strategy.scope():
        saved = td.train.Checkpoint(random=td.train.RandomState()).save(str(tmp_path / "c"))
        first = drawn()
        assert first != drawn()
        td.train.Checkpoint(random=td.train.RandomState()).restore(saved).assert_consumed()
        assert first == drawn()


@on_devices
def test_a_device_of_one_replica_keeps_its_random_state(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN makes its dropout anew after each call that sets the state."""
    sets: list[Any] = []
    original = ACCELERATOR.set_rng_state
    monkeypatch.setattr(ACCELERATOR, "set_rng_state", lambda *args: sets.append(args) or original(*args))
    with td.MirroredStrategy(devices) as strategy:
        strategy.seed_replicas(3)

        def step() -> list[torch.Tensor]:
            drawn = [torch.rand(2, device=KIND)]
            td.get_replica_context().all_reduce("SUM", drawn[0])  # the turn passes
            return [*drawn, torch.rand(2, device=KIND)]

        drawn = [[], []]
        for _ in range(2):
            sets.clear()
            for values in strategy.run(step):
                for replica, value in enumerate(strategy.experimental_local_results(values)):
                    drawn[replica].append(value.cpu())
        assert (len(sets) == 0) is (devices is TWO)
        for replica in range(2):
            torch.manual_seed(3 + replica)
            assert torch.equal(
                torch.stack(drawn[replica]), torch.stack([torch.rand(2, device=KIND).cpu() for _ in range(4)])
            )


def test_a_sampler_leaves_the_random_numbers_of_devices_as_they_are() -> None:
    with td.MirroredStrategy(ONE) as strategy:
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8, replacement=False)
        loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, sampler=sampler)
        torch.manual_seed(5)
        expected = torch.rand(3, device=KIND).cpu()
        torch.manual_seed(5)
        assert (
            sum(float(b.values[0].sum() + b.values[1].sum()) for b in strategy.experimental_distribute_dataset(loader))
            == 28.0
        )
        assert torch.equal(torch.rand(3, device=KIND).cpu(), expected)


@pytest.mark.parametrize("default", ["cpu", KIND])
@pytest.mark.parametrize("where", ["cpu", KIND])
@on_devices
def test_data_that_is_on_a_device_and_a_default_device(devices: list[str], where: str, default: str) -> None:
    """A data set that was put on a GPU as a whole; ``torch.set_default_device``; the last batch has one example."""
    with torch.device(default), td.MirroredStrategy(devices) as strategy:
        data = torch.utils.data.TensorDataset(torch.arange(9.0, device=where), torch.arange(9, device="cpu"))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        seen = []
        for batch in strategy.experimental_distribute_dataset(loader):
            for number, (first, second) in enumerate(
                zip(*map(strategy.experimental_local_results, batch), strict=True)
            ):
                assert first.device == second.device == strategy.worker.torch_device(number)
                assert torch.equal(first.cpu(), second.cpu().float())
                seen += second.tolist()
        assert sorted(seen) == list(range(9))
        assert seen != sorted(seen)


@on_devices
def test_what_is_told_with_a_default_device(devices: list[str]) -> None:
    with torch.device(KIND), td.MirroredStrategy(devices) as strategy:

        def step(x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            whole = td.get_replica_context().all_gather(x, 0)
            (whole * torch.arange(float(len(whole)))[:, None]).sum().backward()
            return x.grad

        x = on_all(strategy, lambda n: torch.ones(1 + n, 1, device="cpu"))
        grads = strategy.experimental_local_results(strategy.run(step, args=(x,)))
        assert [g.reshape(-1).tolist() for g in grads] == [[0.0], [2.0, 4.0]]


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
        with strategy.scope():
            mirrored = td.Variable([1.0, 2.0], trainable=False)
        for delta in (1.0, torch.ones(2), torch.ones(2, device=devices[0].partition("#")[0])):
            mirrored.assign_add([delta, delta] if isinstance(delta, float) else delta)  # of each copy where it is
        mirrored.assign_sub(on_all(strategy, lambda n: torch.full((2,), 1.0 + n)))
        assert [t.cpu().tolist() for t in strategy.experimental_local_results(mirrored)] == [[3.0, 4.0], [2.0, 3.0]]
        assert strategy.reduce("MEAN", result, axis=None).cpu().tolist() == [3.0, 3.0]
        assert strategy.gather(result, 0).cpu().tolist() == [3.0] * 4
        assert float(strategy.reduce("SUM", strategy.run(lambda: torch.ones(())), axis=None)) == 2.0  # of the CPU


@on_devices
@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_values_of_the_cpu_have_derivatives_there(devices: list[str], call: str) -> None:
    def step() -> torch.Tensor:
        replica = td.get_replica_context()
        x = torch.ones(2, 3, device="cpu", requires_grad=True)
        together = replica.all_reduce("SUM", x) if call == "all_reduce" else replica.all_gather(x, 0)
        assert together.device == torch.device(KIND, ACCELERATOR.current_device())
        (together * (1.0 + replica.local_replica_id)).sum().backward()
        assert x.grad is not None
        return x.grad

    with td.MirroredStrategy(devices) as strategy:
        found = strategy.experimental_local_results(strategy.run(step))
    assert [(g.device.type, g.tolist()) for g in found] == [("cpu", [[3.0] * 3] * 2)] * 2


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
