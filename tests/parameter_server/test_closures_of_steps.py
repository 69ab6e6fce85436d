"""``optimizer.step(closure)`` where the servers make the step: in the coordinator's program, and in a function."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KINDS = {"SGD": {"momentum": 0.9}, "Adam": {}, "ASGD": {}, "Rprop": {}}


def step(model: nn.Module, optimizer: Any, number: int, named: bool) -> tuple[float, int]:
    """The loss that the step gives, and how often it called the closure."""
    calls = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        calls.append(number)
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), float(number))).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
    return float(loss.detach()), len(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_called_once_and_the_servers_make_the_step(cluster: Any, kind: str) -> None:
    c = cluster(workers=1, ps=1)
    torch.manual_seed(0)
    with c.strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **KINDS[kind])
    alone = nn.Linear(3, 1)
    alone.load_state_dict(model.state_dict())
    theirs = getattr(torch.optim, kind)(alone.parameters(), lr=0.05, **KINDS[kind])
    for number in range(1, 6):
        named = number % 2 == 0
        if number < 3:
            found = c.coordinator.schedule(step, args=(model, optimizer, number, named)).get()
        else:
            found = step(model, optimizer, number, named)
        assert found == pytest.approx(step(alone, theirs, number, named))
        torch.testing.assert_close(model.weight.detach().clone(), alone.weight.detach())


class Twice(torch.optim.SGD):
    """An optimizer of somebody else, which wants the loss again."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return super().step(closure)


def test_a_closure_of_an_optimizer_that_is_not_of_torch_is_refused(cluster: Any) -> None:
    strategy = cluster(workers=1, ps=1).strategy
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = Twice(model.parameters(), lr=0.05)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"Twice\.step\(closure\) .* Call backward\(\) first, then step\(\) alone"):
        step(model, optimizer, 1, named=False)
    assert torch.equal(model.weight.detach(), before)
