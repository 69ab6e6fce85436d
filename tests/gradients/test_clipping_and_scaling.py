"""Clipping, loss scaling and autocast under a strategy."""

from __future__ import annotations

import contextlib
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
