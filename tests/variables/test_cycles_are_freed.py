"""What a program lets go is freed: models that hold themselves, batches and results of a run, what an error held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics

import tfstyle_dist as td


@pytest.fixture(params=[td.MirroredStrategy, td.experimental.CentralStorageStrategy])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(["cpu:0", "cpu:1"]) as made:
        yield made


class HoldsItsMethod(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.function = self.helper

    def helper(self) -> None:
        pass


class PartKnowsTheWhole(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(2, 2))
        self[0].whole = [self]


class HookOfItsOwn(HoldsItsMethod):
    def __init__(self) -> None:
        super().__init__()
        del self.function
        self.register_forward_hook(self.seen)

    def seen(self, *_: Any) -> None:
        pass


class NamesItselfInTheStep(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.itself = [self]
        return super().forward(x)


class Trainer:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.model.trainer = self


def modules(thing: Any) -> Any:
    return thing.model if isinstance(thing, Trainer) else thing


def trained(strategy: Any, make: Callable[[], Any]) -> list[weakref.ref[Any]]:
    with strategy.scope():
        thing = make()
        model = modules(thing)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        (thing.model if isinstance(thing, Trainer) else thing)(torch.ones(2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    strategy.run(step)
    return [weakref.ref(held) for held in (thing, model, optimizer, *model.parameters())]


def test_a_model_in_a_cycle_is_freed_while_the_strategy_lives(strategy: Any) -> None:
    for make in (HoldsItsMethod, PartKnowsTheWhole, HookOfItsOwn, NamesItselfInTheStep, Trainer):
        dropped = trained(strategy, make)
        gc.collect()
        strategy.run(lambda: None)
        assert [r() for r in dropped if r() is not None] == []


def test_it_is_freed_where_no_collection_came_by_itself(strategy: Any) -> None:
    class Wide(HoldsItsMethod):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(300))

    gc.disable()
    try:
        first, *_ = [trained(strategy, Wide) for _ in range(2)]
    finally:
        gc.enable()
    assert [r() for r in first if r() is not None] == []


def test_what_lives_keeps_what_each_replica_has(strategy: Any) -> None:
    class Counts(HoldsItsMethod):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = td.get_replica_context().replica_id_in_sync_group
            self.seen = [*getattr(self, "seen", []), replica]
            return super().forward(x)

    with strategy.scope():
        model = Counts()
    strategy.run(lambda: model(torch.ones(2)))
    trained(strategy, HoldsItsMethod)
    gc.collect()
    assert strategy.run(lambda: None) is None
    model.number = 3  # written outside: it reaches both, and what they have of their own stays
    seen = strategy.run(lambda: (model(torch.ones(2)).sum(), tuple(model.seen), model.number))
    assert [r[1:] for r in strategy.experimental_local_results(seen)] == [((0, 0), 3), ((1, 1), 3)]
    assert all("tfstyle" not in name for name in vars(model))


def test_a_metric_is_freed() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:

        def counted() -> weakref.ref[Any]:
            metric = torchmetrics.MeanMetric()
            strategy.run(lambda: metric.update(torch.ones(3)))
            assert metric.compute() == 1
            return weakref.ref(metric)

        dropped = [counted() for _ in range(3)]
        gc.collect()
        strategy.run(lambda: None)
        assert [r() for r in dropped if r() is not None] == []


@pytest.mark.parametrize("fails_on", [None, (0, 1), (1,)])
def test_a_run_leaves_nothing_for_the_garbage_collector(strategy: Any, fails_on: tuple[int, ...] | None) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    held: list[weakref.ref[torch.Tensor]] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        held.extend((weakref.ref(x), weakref.ref(out)))
        replica = td.get_replica_context().replica_id_in_sync_group
        if fails_on is not None and replica in fails_on:
            raise ValueError("as it is meant")
        out.sum().backward()
        return out.detach()

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            batch = torch.ones(4, 2)
            if fails_on is None:
                strategy.run(step, args=(batch,))
            else:
                with pytest.raises(ValueError, match="meant") as caught:
                    strategy.run(step, args=(batch,))
                del caught
        del batch
        assert [r() for r in held if r() is not None] == []
    finally:
        gc.enable()
