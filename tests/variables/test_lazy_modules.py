"""Lazy modules, whose parameters get their shape late: with a state that is loaded, and next to tensors that went."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.variables.content import data_writes

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]])


def train(model: torch.nn.Module, strategy: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        return model.state_dict()["0.weight"].clone()

    for _ in range(3):
        weights = step() if strategy is None else strategy.run(step)
    return [weights] if strategy is None else list(strategy.experimental_local_results(weights))


def lazy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("make", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def test_a_lazy_model_that_gets_its_parameters_from_a_saved_state_trains(make: Any) -> None:
    torch.manual_seed(0)
    plain = lazy()
    plain(X)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    (expected,) = train(plain, None)
    with make(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = lazy()
        model.load_state_dict(state)
        for found in train(model, strategy):
            torch.testing.assert_close(found, expected)


def test_a_lazy_parameter_may_have_the_number_of_a_tensor_that_went(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    counted = data_writes._count_write
    monkeypatch.setattr(data_writes, "_count_write", lambda tensor: (seen.append(tensor), counted(tensor)))
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(3, 1))
            layer = torch.nn.LazyLinear(1)
        train(model, strategy)
        contents = strategy.parameter_store.contents
        assert contents is not None
        contents._data._look()
        contents._data._numbers.add(id(layer.weight))
        layer(X)
    assert any(isinstance(tensor, torch.nn.Parameter) for tensor in seen)
