"""Helpers for tests of training on two replicas, in one process or as two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as td

both_process_models = pytest.mark.parametrize(
    "process_model", ["in_process", pytest.param("ranks", marks=pytest.mark.distributed(workers=2))]
)
"""Runs a test that takes ``strategy`` twice: with two replicas in this process, and as two ranks."""


def built(strategy: td.Strategy, build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module made in the strategy's scope, in float64; its twin is ``plain(build)``."""
    with strategy.scope():
        return plain(build, seed)


def plain(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same module without a strategy."""
    torch.manual_seed(seed)
    return build().double()


def small() -> nn.Module:
    """Two layers, ten features to one number."""
    return nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1))


@functools.cache
def _diabetes() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_diabetes

    features, target = load_diabetes(return_X_y=True)
    return torch.tensor(features) * 20.0, torch.tensor(target) / 100.0


def examples(step: int = 0, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of the diabetes data in float64."""
    features, target = _diabetes()
    return features[step * count : (step + 1) * count], target[step * count : (step + 1) * count]


def half(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The calling replica's half of ``examples(step)``, on its device."""
    features, target = (values.chunk(2)[replica()] for values in examples(step))
    here = torch.empty(0).device
    return features.to(here), target.to(here)


def mse(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean squared error of a batch."""
    return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).mean()


def on_all(strategy: td.Strategy, fn: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What each replica of every worker gets from ``fn``, the replica first."""

    def gather() -> torch.Tensor:
        context = td.get_replica_context()
        assert context is not None
        return context.all_gather(fn().detach().clone().unsqueeze(0), axis=0)

    result: Any = strategy.experimental_local_results(strategy.run(gather))[0]
    return result


def gradients(strategy: td.Strategy, model: nn.Module) -> torch.Tensor:
    """All gradients of each replica as one row; NaN where there is none."""
    return on_all(strategy, lambda: flat_gradients(model))


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients in a row; NaN where there is none."""
    rows = [torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([r.to_dense().reshape(-1) if r.is_sparse else r.reshape(-1) for r in rows])


def weights(strategy: td.Strategy, model: nn.Module) -> torch.Tensor:
    """All weights of each replica as one row."""
    return on_all(strategy, lambda: flat_weights(model))


def flat_weights(model: nn.Module) -> torch.Tensor:
    """All weights in a row."""
    with torch.no_grad():
        return torch.cat([p.reshape(-1) + 0 for p in model.parameters()])


def assert_all_close(rows: torch.Tensor, expected: torch.Tensor) -> None:
    """Both replicas have bitwise the same row, and it is ``expected`` but for float64 rounding."""
    assert rows.shape == (2, *expected.shape)
    torch.testing.assert_close(rows[0], rows[1], rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(rows[0], expected, rtol=1e-11, atol=1e-12, equal_nan=True)
