"""Attributes in ``__slots__`` of objects that have a ``__dict__`` too, as where a base class has no slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from this_replica import replica
from torch import nn
from until import wait_until_gone


class Trainer:
    def __init__(self, kept: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.kept = kept


def results(strategy: Any, step: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(strategy.experimental_local_results(strategy.run(step)))


class Meter:
    """Without slots, so that what is derived from it has both."""


class SlottedMeter(Meter):
    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count, self.total, self.values = 0, torch.zeros(()), [0]

    def add(self, value: int) -> tuple[int, float, list[int], int]:
        self.count += 1
        self.total += value
        self.values.append(value)
        self.last = value
        return self.count, float(self.total), list(self.values), self.last


@pytest.mark.parametrize("place", ["trainer", "named", "list"])
def test_slots_beside_a_dict(strategy: Any, place: str) -> None:
    meter = SlottedMeter()
    trainer = Trainer(meter)
    meters = [meter]
    found: dict[str, Callable[[], Any]] = {
        "trainer": lambda: trainer.kept,
        "named": lambda: meter,
        "list": lambda: meters[0],
    }
    step = found[place]
    assert results(strategy, lambda: step().add(1 + replica())) == ((1, 1.0, [0, 1], 1), (1, 2.0, [0, 2], 2))
    assert results(strategy, lambda: step().add(1 + replica())) == ((2, 2.0, [0, 1, 1], 1), (2, 4.0, [0, 2, 2], 2))
    assert (meter.count, float(meter.total), meter.values, meter.last) == (2, 2.0, [0, 1, 1], 1)
    meter.count = 10
    assert [count for count, *_ in results(strategy, lambda: step().add(0))] == [11, 11]


def test_a_model_in_a_slot_beside_a_dict(strategy: Any) -> None:
    class SlottedEngine(Meter):
        __slots__ = ("model", "progress")

    engine = SlottedEngine()
    with strategy.scope():
        engine.model = nn.Linear(1, 1)
    engine.progress = Trainer(0)
    engine.calls = 0

    def step() -> tuple[int, int]:
        engine.calls += 1 + replica()
        engine.progress.kept += 1
        engine.model(torch.ones(1, 1)).sum().backward()
        return engine.calls, engine.progress.kept

    results(strategy, step)
    assert results(strategy, step) == ((2, 2), (4, 2))
    assert engine.model.weight.grad.item() == 2.0  # the mean over the replicas, twice


class Slotted:
    """What a class derived from it has in a ``__dict__`` is beside this."""

    __slots__ = ("calls", "log", "mean")

    def begin(self) -> None:
        self.calls, self.log, self.mean = 0, list[int](), torch.zeros(2)

    def count(self, value: int) -> tuple[int, list[int], float]:
        self.calls += 1
        self.log.append(value)
        self.mean += value
        return self.calls, list(self.log), float(self.mean.sum())


class SlottedModule(Slotted, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.begin()


def test_slots_of_a_module_and_what_is_written_to_them_outside(strategy: Any) -> None:
    with strategy.scope():
        trainer = Trainer(None)
        counting = SlottedModule()
        trainer.kept = counting

    def step() -> tuple[int, list[int], float]:
        found = counting.count(replica())
        trainer.model(torch.ones(1, 1)).sum().backward()
        return found

    results(strategy, step)
    counting.mean = counting.mean + 2.0  # also what is written outside
    assert results(strategy, step) == ((2, [0, 0], 4.0), (2, [1, 1], 6.0))
    assert (counting.calls, counting.log) == (2, [0, 0])
    gone, counting = ref(counting), None  # type: ignore[assignment]
    trainer.kept = None
    results(strategy, lambda: None)
    results(strategy, lambda: None)
    wait_until_gone(gone)


def test_a_class_of_a_function_is_let_go_with_what_its_methods_name(strategy: Any) -> None:
    def trained() -> list[ref[Any]]:
        data = torch.ones(1, 1)

        class Local(nn.Linear):
            def forward(self, _: Any = None) -> torch.Tensor:
                return super().forward(data)

        class LocalSlotted(SlottedModule):
            def read(self) -> torch.Tensor:
                return data

        with strategy.scope():
            model, counting = Local(1, 1), LocalSlotted()
        results(strategy, lambda: (model().sum().backward(), counting.count(1)))
        return [ref(data), ref(Local), ref(LocalSlotted)]

    gone = trained()
    for _ in range(2):
        results(strategy, lambda: None)
    for reference in gone:
        wait_until_gone(reference)
