"""A step that fails leaves nothing of its run in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from until import wait_until, wait_until_gone

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def strategy() -> Iterator[td.MirroredStrategy]:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


class Broken(torch.optim.SGD):
    """Its update fails."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        raise ValueError("a step that fails")


def _fail(strategy: td.MirroredStrategy, kind: type[torch.optim.SGD], before: bool) -> weakref.ref[torch.nn.Module]:
    """Runs a step that fails, in replica 1 before the update or in the update, and gives its model."""
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        if before and td.get_replica_context().replica_id_in_sync_group == 1:
            raise ValueError("a step that fails")
        optimizer.step()

    with pytest.raises(ValueError, match="a step that fails"):
        strategy.run(step)
    return weakref.ref(model)


@pytest.mark.parametrize(("kind", "before"), [(torch.optim.SGD, True), (Broken, False)], ids=["before", "within"])
def test_what_a_failed_run_held_is_let_go(
    strategy: td.MirroredStrategy, kind: type[torch.optim.SGD], before: bool
) -> None:
    model = _fail(strategy, kind, before)

    def is_gone() -> bool:
        gc.collect()
        return model() is None

    wait_until(is_gone, 20)  # threads of autograd let go of a graph a little later


def test_a_step_outside_of_run_that_failed_is_let_go_by_the_next_one(strategy: td.MirroredStrategy) -> None:
    def fail() -> weakref.ref[torch.nn.Module]:
        held, weight = torch.nn.Linear(1, 1), torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match="a step that fails"):
            Broken([weight], lr=0.1).step()
        return weakref.ref(held)

    held = fail()
    weight = torch.ones(2, requires_grad=True)
    torch.optim.SGD([weight], lr=0.1).step()
    wait_until_gone(held)


def test_a_run_within_a_step_leaves_the_step_what_it_is(
    strategy: td.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closure that runs the replicas: the post-hook of the step around it still knows it."""
    with strategy.scope():
        model, around = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1)
    inner, outer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, around))

    def step() -> None:
        inner.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        inner.step()

    def closure() -> float:
        strategy.run(step)
        return 0.0

    ended: list[torch.optim.Optimizer] = []
    after = strategy.update_runner.after_step

    def noted(optimizer: torch.optim.Optimizer, records: Any) -> None:
        ended.append(optimizer)
        after(optimizer, records)

    monkeypatch.setattr(strategy.update_runner, "after_step", noted)
    outer.step(closure)
    assert ended == [inner, inner, outer]
