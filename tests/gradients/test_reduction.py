"""What ``backward()`` leaves in ``.grad`` on every replica."""

from __future__ import annotations

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
    plain,
    replica,
    small,
    weights,
)

import tfstyle_dist as td


@both_process_models
def test_mean_of_even_batches_is_the_big_batch(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    strategy.run(lambda: mse(model, half()).backward())
    mse(reference, examples()).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
@pytest.mark.parametrize("scale", ["MEAN", "SUM"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_passes_reduce_only_the_new_part(
    strategy: td.Strategy, process_model: str, scale: str, set_to_none: bool
) -> None:
    model, reference = built(strategy, small), plain(small)
    strategy.set_gradient_policy(scale=scale)
    factor = 2.0 if scale == "SUM" else 1.0

    def passes() -> None:
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            for step in range(3):
                mse(model, half(step)).backward()

    strategy.run(passes)
    (factor * sum(mse(reference, examples(step)) for step in range(3))).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


class _Half(nn.Module):
    """One layer that all replicas use, and one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(10, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.nobodys = nn.Linear(3, 3)

    def forward(self, features: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.common(features)))


@both_process_models
@pytest.mark.parametrize("scale", ["MEAN", "SUM"])
@pytest.mark.parametrize("passes", [1, 2])
def test_parameters_used_on_one_replica(strategy: td.Strategy, process_model: str, scale: str, passes: int) -> None:
    model, reference = built(strategy, _Half), plain(_Half)
    strategy.set_gradient_policy(scale=scale)
    divisor = 2.0 if scale == "MEAN" else 1.0

    def step() -> None:
        for k in range(passes):
            # In the second pass each replica uses the other one's head.
            model(half(k)[0], (replica() + k) % 2).sum().backward()

    strategy.run(step)
    for k in range(passes):
        for part, features in enumerate(examples(k)[0].chunk(2)):
            (reference(features, (part + k) % 2).sum() / divisor).backward()
    assert torch.isnan(flat_gradients(reference)[-12:]).all(), "a parameter that nobody used has a gradient"
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
@pytest.mark.parametrize("scale", ["MEAN", "SUM"])
def test_gradient_taken_aside_does_not_disturb_the_sum(strategy: td.Strategy, process_model: str, scale: str) -> None:
    """``torch.autograd.grad`` runs the hooks of a parameter, but changes nothing in ``.grad``."""
    model, reference = built(strategy, _Half), plain(_Half)
    strategy.set_gradient_policy(scale=scale)
    divisor = 2.0 if scale == "MEAN" else 1.0

    def step() -> None:
        model(half(0)[0], 0).sum().backward()
        if replica() == 0:
            torch.autograd.grad(model(half(0)[0], 1).sum(), list(model.heads[1].parameters()))
            torch.autograd.grad(model(half(0)[0], 0).sum(), list(model.heads[0].parameters()))
        model.zero_grad()
        model(half(1)[0], replica()).sum().backward()

    strategy.run(step)
    for part, features in enumerate(examples(1)[0].chunk(2)):
        (reference(features, part).sum() / divisor).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_accumulate_equals_the_big_batch(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def step(first: int) -> None:
        optimizer.zero_grad()
        with strategy.accumulate():
            for k in range(2):
                (mse(model, half(first + k)) / 3).backward()
        (mse(model, half(first + 2)) / 3).backward()
        optimizer.step()

    for first in (0, 3):
        strategy.run(step, args=(first,))
        expected.zero_grad()
        for k in range(3):
            (mse(reference, examples(first + k)) / 3).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_accumulate_around_run(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    with strategy.accumulate():
        strategy.run(lambda: mse(model, half(0)).backward())
        local = gradients(strategy, model)
        assert not torch.equal(local[0], local[1])
    strategy.run(lambda: mse(model, half(1)).backward())
    (mse(reference, examples(0)) + mse(reference, examples(1))).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_accumulate_with_sum(strategy: td.Strategy, process_model: str) -> None:
    """The part that was reduced before, the accumulated part and the last part count once each."""
    model, reference = built(strategy, small), plain(small)
    strategy.set_gradient_policy(scale="SUM")

    def step() -> None:
        mse(model, half(0)).backward()
        with strategy.accumulate():
            mse(model, half(1)).backward()
        mse(model, half(2)).backward()

    strategy.run(step)
    (2.0 * sum(mse(reference, examples(k)) for k in range(3))).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_step_of_accumulated_gradients_raises(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with strategy.accumulate():
            mse(model, half()).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"accumulate\(\) and never reduced"):
        strategy.run(step)

    def after_zero_grad() -> None:
        optimizer.zero_grad()
        mse(model, half()).backward()
        optimizer.step()

    strategy.run(after_zero_grad)


@both_process_models
def test_a_pass_that_raised_does_not_spoil_the_next(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    strategy.set_gradient_policy(scale="SUM")

    def raising(_: torch.Tensor) -> None:
        raise ValueError("in backward")

    def step() -> None:
        loss = mse(model, half(0))
        hook = model[0].weight.register_hook(raising)
        with pytest.raises(ValueError, match="in backward"):
            loss.backward()
        hook.remove()
        model.zero_grad()
        mse(model, half(1)).backward()

    strategy.run(step)
    (2.0 * mse(reference, examples(1))).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


def test_rows_are_added_to_a_large_gradient() -> None:
    """On a CPU replicas share the memory of large gradients until one writes; torch cannot add rows to such a one."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            table = nn.Embedding(4096, 32, sparse=True)

        def step() -> torch.Tensor:
            (torch.ones(2, 32) @ table.weight.T).sum().backward()
            table(torch.arange(2000)).sum().backward()
            return table.weight.grad.sum()

        found = strategy.experimental_local_results(strategy.run(step))
        assert [float(value) for value in found] == [2 * 4096 * 32 + 2000 * 32] * 2
