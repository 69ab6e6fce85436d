"""Plain ``torch.optim`` optimizers, clipping, scaling, closures and schedulers under a strategy."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import on_devices
import pytest
import torch
from torch import nn
from two_replicas import (
    assert_all_close,
    both_process_models,
    built,
    examples,
    flat_gradients,
    flat_weights,
    gradients,
    half,
    mse,
    on_all,
    plain,
    replica,
    small,
    weights,
)

import tfstyle_dist as td


@both_process_models
def test_clip_grad_norm_in_every_replica(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def step() -> torch.Tensor:
        mse(model, half()).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    norms = on_all(strategy, step)
    mse(reference, examples()).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert norm > 0.1
    assert_all_close(norms, norm.detach())
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_clip_grad_value_in_every_replica(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def step() -> None:
        mse(model, half()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)

    strategy.run(step)
    mse(reference, examples()).backward()
    nn.utils.clip_grad_value_(reference.parameters(), 0.05)
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


CHANGES: dict[str, Callable[[nn.Parameter, torch.optim.Optimizer, torch.amp.GradScaler], Any]] = {
    "clip_grad_norm_": lambda p, o, s: nn.utils.clip_grad_norm_([p], 0.1),
    "clip_grad_norm_ of lists": lambda p, o, s: nn.utils.clip_grad_norm_([p], 0.1, foreach=True),
    "clip_grad_value_": lambda p, o, s: nn.utils.clip_grad_value_([p], 0.01),
    "zero_grad": lambda p, o, s: o.zero_grad(set_to_none=False),
    "a list of tensors": lambda p, o, s: torch._foreach_mul_([p.grad], 3.0),
    "unscale_": lambda p, o, s: s.unscale_(o),
}


@pytest.mark.parametrize("changes", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_large_gradient_that_one_replica_changes(strategy: td.Strategy, change: str, changes: int) -> None:
    """On a CPU replicas share the memory of large gradients until one of them writes to it."""
    weight = built(strategy, lambda: nn.Linear(256, 256, bias=False)).weight
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler(on_devices.KIND, init_scale=8.0)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        scaler.scale(weight.sum() * replica() * 2).backward()
        before = weight.grad.detach().clone()
        if replica() == changes:
            CHANGES[change](weight, optimizer, scaler)
        td.get_replica_context().all_reduce("SUM", before[0])  # the other replica has its turn
        return before, weight.grad.detach().clone()

    before, after = (strategy.experimental_local_results(value) for value in strategy.run(step))
    assert [float(b.cpu().sum()) for b in before] == [8.0 * 65536] * 2
    assert not torch.equal(before[changes], after[changes])
    assert torch.equal(before[1 - changes], after[1 - changes])


@pytest.mark.cpu_only("its fused optimizers; those of devices are in tests/gpu")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_fused_steps_with_large_gradients(strategy: td.Strategy, kind: Callable[..., torch.optim.Optimizer]) -> None:
    """With a scaler they divide the gradients themselves."""
    model, reference = (make(lambda: nn.Linear(256, 256)) for make in (functools.partial(built, strategy), plain))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(3)]
    optimizers = [kind(m.parameters(), 0.1, fused=True) for m in (model, reference)]

    def step(model: nn.Module, number: int, scaler: torch.amp.GradScaler) -> None:
        optimizers[number].zero_grad()
        scaler.scale(model(torch.ones(2, 256, dtype=torch.float64)).square().mean()).backward()
        scaler.step(optimizers[number])
        scaler.update()

    for _ in range(3):
        strategy.run(lambda: step(model, 0, scalers[replica()]))
        step(reference, 1, scalers[2])
    assert_all_close(weights(strategy, model), flat_weights(reference))


@pytest.mark.parametrize("around", ["forward", "step", "run"])
@both_process_models
def test_autocast(strategy: td.Strategy, around: str, process_model: str) -> None:
    """Inside of it torch keeps what it has cast, with references that let no parameter change its content."""

    def autocast(here: str) -> Any:
        return torch.autocast(on_devices.KIND, torch.bfloat16) if here == around else contextlib.nullcontext()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with autocast("forward"):
            return mse(model, (batch[0].float(), batch[1].float()))

    def step(k: int) -> None:
        with autocast("step"):
            optimizer.zero_grad()
            loss(model, half(k)).backward()
            optimizer.step()

    model, reference = built(strategy, small).float(), plain(small).float()
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for k in range(4):
        with autocast("run"):
            strategy.run(step, args=(k,))
        expected.zero_grad()
        for share in zip(*(values.to(torch.empty(0).device).chunk(2) for values in examples(k)), strict=True):
            with torch.autocast(on_devices.KIND, torch.bfloat16):
                (mse(reference, (share[0].float(), share[1].float())) / 2).backward()
        expected.step()
    rows = weights(strategy, model)
    assert torch.equal(rows[0].cpu(), rows[1].cpu())
    torch.testing.assert_close(rows[0], flat_weights(reference), rtol=1e-3, atol=1e-4)
    assert not torch.equal(rows[0].cpu(), flat_weights(plain(small).float()).cpu())


@both_process_models
def test_grad_scaler_skips_everywhere_after_an_overflow_on_one_replica(
    strategy: td.Strategy, process_model: str
) -> None:
    """One scaler for each replica; the gradients are equal, so the scalers stay equal."""
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    scalers = [torch.amp.GradScaler(on_devices.KIND, init_scale=8.0, growth_interval=100) for _ in range(2)]

    def step(k: int, overflow: bool) -> torch.Tensor:
        scaler = scalers[replica()]
        optimizer.zero_grad()
        loss = mse(model, half(k))
        if overflow and replica() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return torch.tensor(scaler.get_scale())

    for k, overflow in enumerate([False, True, False]):
        scales = on_all(strategy, lambda k=k, overflow=overflow: step(k, overflow))
        assert scales.tolist() == ([8.0, 8.0] if k == 0 else [4.0, 4.0])
        if overflow:
            continue
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_step_with_a_closure(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)

    def run_closure(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], keyword: bool) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        return optimizer.step(closure=closure) if keyword else optimizer.step(closure)

    for k, keyword in enumerate([False, True]):
        losses = on_all(
            strategy,
            lambda k=k, keyword=keyword: run_closure(optimizer, lambda: mse(model, half(k)), keyword).detach(),
        )
        total = run_closure(expected, lambda k=k: mse(reference, examples(k)), keyword)
        torch.testing.assert_close(losses.mean(), total.detach(), rtol=1e-11, atol=0.0)
        assert losses[0] != losses[1], "each replica has its own loss"
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_scheduler_outside_run(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, expected)]

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_scheduler_inside_run(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step() -> None:
        mse(model, half()).backward()
        optimizer.step()
        schedule.step()

    for expected in (0.05, 0.025):  # each replica has the content of a scheduler of its own
        strategy.run(step)
        assert optimizer.param_groups[0]["lr"] == expected
        assert (
            strategy.experimental_local_results(strategy.run(lambda: optimizer.param_groups[0]["lr"] + 0))
            == (expected,) * strategy.worker.num_local_replicas
        )


@both_process_models
def test_parameter_groups(strategy: td.Strategy, process_model: str) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "lr": 0.01},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.1)

    model, reference = built(strategy, small), plain(small)
    optimizer, expected = optimizer_of(model), optimizer_of(reference)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
@pytest.mark.parametrize("form", ["foreach", "fused", "for_loop"])
def test_forms_of_an_optimizer(strategy: td.Strategy, process_model: str, form: str) -> None:
    options = {"foreach": form == "foreach", "fused": form == "fused"}
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01, **options)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_two_optimizers_and_an_early_skip(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def both_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[2].parameters(), lr=0.01),
        ]

    optimizers, expected = both_of(model), both_of(reference)

    def is_small(model: nn.Module) -> bool:
        return bool(model[0].weight.grad.abs().max() < 0.6)

    def step(k: int) -> None:
        model.zero_grad()
        mse(model, half(k)).backward()
        if is_small(model):  # the same decision everywhere: gradients are equal
            return
        for optimizer in optimizers[: 1 + k % 2]:
            optimizer.step()

    skipped = []
    for k in range(4):
        strategy.run(step, args=(k,))
        reference.zero_grad()
        mse(reference, examples(k)).backward()
        skipped.append(is_small(reference))
        for optimizer in [] if skipped[-1] else expected[: 1 + k % 2]:
            optimizer.step()
    assert set(skipped) == {False, True}
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_mixing_owned_and_foreign_parameters_raises(strategy: td.Strategy, process_model: str) -> None:
    model, foreign = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD([*model.parameters(), *foreign.parameters()], lr=0.1)
    with pytest.raises(RuntimeError, match="mixes parameters"):
        strategy.run(lambda: optimizer.step())


@both_process_models
def test_only_foreign_parameters_inside_run_raises(strategy: td.Strategy, process_model: str) -> None:
    foreign = plain(small)
    optimizer = torch.optim.SGD(foreign.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="none of its parameters"):
        strategy.run(lambda: optimizer.step())
    mse(foreign, examples()).backward()
    optimizer.step()


@both_process_models
def test_adopting_cures_both(strategy: td.Strategy, process_model: str) -> None:
    model, reference = plain(small), plain(small)
    assert strategy.experimental_adopt(model) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)

    def step() -> None:
        mse(model, half()).backward()
        optimizer.step()

    strategy.run(step)
    mse(reference, examples()).backward()
    expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_lbfgs_is_refused(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match="LBFGS"):
        strategy.run(lambda: optimizer.step(lambda: mse(model, half())))


@both_process_models
def test_optimizer_state_interchanges_with_a_plain_optimizer(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    def plain_step(k: int) -> None:
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()

    plain_step(0)
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    for k in (1, 2):
        strategy.run(step, args=(k,))
        plain_step(k)
    assert_all_close(weights(strategy, model), flat_weights(reference))
    saved, wanted = optimizer.state_dict(), expected.state_dict()
    assert saved["state"].keys() == wanted["state"].keys()
    for key, entry in wanted["state"].items():
        for name, value in entry.items():
            assert type(saved["state"][key][name]) is type(value)
            torch.testing.assert_close(saved["state"][key][name], value, rtol=1e-11, atol=1e-12)
    reference.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(saved))
    strategy.run(step, args=(3,))
    plain_step(3)
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_optimizer_step_outside_run(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for k in range(2):
        optimizer.zero_grad()
        strategy.run(lambda k=k: mse(model, half(k)).backward())
        optimizer.step()
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_in_ranks(strategy: td.Strategy, backend: Any) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(compiled, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


class _Patient(torch.optim.SGD):
    """Torch hooks this step and, once an SGD was made, that of its base too."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("not today")
        return super().step(closure)


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_a_step_that_calls_the_step_of_its_base_counts_once(kind: str) -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # its class is hooked from here on
    made = td.MirroredStrategy if kind == "mirrored" else td.experimental.CentralStorageStrategy
    with made(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.ones_(model.weight)
            optimizer = _Patient(model.parameters(), lr=0.25)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert model.weight.item() == 0.75
        _Patient.fails = True
        with pytest.raises(ValueError, match="not today"):
            strategy.run(step)
        _Patient.fails = False
        strategy.run(step)  # what the failed step left behind does not hide this one
        assert model.weight.item() == 0.5
