"""Hooks that a program registers for gradients work before these are made equal, as on one device."""

from __future__ import annotations

import pytest
import torch
from two_replicas import assert_all_close, built, examples, flat_weights, half, mse, plain, small, weights

import tfstyle_dist as td

OVER_SOCKETS = pytest.mark.distributed(workers=2, env={"TFSTYLE_SHARED_MEMORY": "0"})


def doubled(parameter: torch.Tensor) -> None:
    """A hook."""
    assert parameter.grad is not None
    parameter.grad.mul_(2)


@pytest.mark.parametrize(
    "process_model",
    [
        "in_process",
        pytest.param("shared memory", marks=pytest.mark.distributed(workers=2)),
        pytest.param("sockets", marks=OVER_SOCKETS),
    ],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_hook_may_change_the_accumulated_gradient(strategy: td.Strategy, process_model: str, passes: int) -> None:
    """Of one parameter in a bucket with others; registered after the strategy's own, in one pass or in several."""
    model, reference = built(strategy, small), plain(small)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for each in (model, reference):
        each[0].weight.register_post_accumulate_grad_hook(doubled)

    def step(k: int) -> None:
        optimizers[0].zero_grad()
        for _ in range(passes):
            mse(model, half(k)).backward()
        optimizers[0].step()

    for k in range(3):
        strategy.run(step, args=(k,))
        optimizers[1].zero_grad()
        for _ in range(passes):
            mse(reference, examples(k)).backward()
        optimizers[1].step()
    assert_all_close(weights(strategy, model), flat_weights(reference))
