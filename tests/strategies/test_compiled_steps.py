"""Compiled functions in which the turn passes: what passes it is not compiled, so each replica gets its own content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.experimental import CentralStorageStrategy

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # Dynamo warns of what it does not compile
]
KINDS = {"mirrored": td.MirroredStrategy, "central": CentralStorageStrategy}


@pytest.fixture(params=list(KINDS))
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    with KINDS[request.param](["cpu:0", "cpu:1"]) as made:
        yield made
    torch._dynamo.reset()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def examples(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(4, 3) * (step + 1)


def share(step: int) -> torch.Tensor:
    replica: Any = td.get_replica_context()
    return examples(step).chunk(2)[replica.replica_id_in_sync_group]


def backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()


def alone(steps: int = 3) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for k in range(steps):
        backward(model, optimizer, examples(k))
        optimizer.step()
    return list(model.parameters())


def check(strategy: td.Strategy, make_step: Callable[[torch.nn.Module, torch.optim.Optimizer], Any]) -> None:
    with strategy.scope():
        model = network()
    for parameter in model.parameters():
        parameter.note = "kept with the Python object"  # type: ignore[attr-defined]
    step = make_step(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for k in range(3):
        strategy.run(step, args=(k,))
    for parameter, expected in zip(model.parameters(), alone(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_the_optimizers_step_is_compiled(strategy: td.Strategy) -> None:
    def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        compiled = torch.compile(lambda: optimizer.step(), backend="aot_eager")

        def step(k: int) -> None:
            backward(model, optimizer, share(k))
            compiled()

        return step

    check(strategy, make_step)


def test_backward_update_and_merge_call_are_compiled(strategy: td.Strategy) -> None:
    merged = []

    def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        @torch.compile(backend="aot_eager")
        def whole(inputs: torch.Tensor) -> None:
            backward(model, optimizer, inputs)
            optimizer.step()
            replica: Any = td.get_replica_context()
            replica.merge_call(lambda _, number: merged.append(number), args=(inputs.shape[0],))

        return lambda k: whole(share(k))

    check(strategy, make_step)
    assert len(merged) == 3
