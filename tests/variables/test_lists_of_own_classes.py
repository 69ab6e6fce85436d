"""Lists, sets and deques of a program's own class, such as a ring of examples: entries and attributes go together."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn


class Ring(list[Any]):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.place, self.averages = capacity, 0, []

    def push(self, value: torch.Tensor) -> None:
        if len(self) < self.capacity:
            self.append(value)
        else:
            self[self.place] = value
        self.place = (self.place + 1) % self.capacity
        self.averages.append(float(sum(self)) / len(self))


class Recent(deque[Any]):
    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)
        self.place, self.averages = 0, []

    def push(self, value: torch.Tensor) -> None:
        self.append(value)
        self.place += 1
        self.averages.append(float(sum(self)) / len(self))


class Trainer:
    def __init__(self, kept: Any) -> None:
        self.model, self.kept = nn.Linear(1, 1), kept

    def step(self, number: int) -> None:
        self.kept.push(torch.tensor(10.0 * number + replica()))


def _kept(strategy: Any, trainer: Trainer) -> list[tuple[list[float], int, list[float]]]:
    def look() -> tuple[list[float], int, list[float]]:
        assert trainer.model is not None
        return list(map(float, trainer.kept)), trainer.kept.place, list(trainer.kept.averages)

    return list(strategy.experimental_local_results(strategy.run(look)))


@pytest.mark.parametrize("in_a_module", [False, True])
@pytest.mark.parametrize("kind", [Ring, Recent])
def test_each_replica_has_its_own(strategy: Any, kind: Any, in_a_module: bool) -> None:
    with strategy.scope():
        trainer = Trainer(kind(2))
        if in_a_module:
            trainer.model.kept = trainer.kept  # type: ignore[assignment]
    kept = trainer.kept
    for number in range(3):
        strategy.run(trainer.step, args=(number,))
    entries = [[20.0, 10.0], [21.0, 11.0]] if kind is Ring else [[10.0, 20.0], [11.0, 21.0]]
    places = 1 if kind is Ring else 3
    assert _kept(strategy, trainer) == [(entries[r], places, [0.0 + r, 5.0 + r, 15.0 + r]) for r in range(2)]
    assert trainer.kept is kept
    assert kept.place == places
    assert type(kept) is kind
    if in_a_module:
        assert strategy.run(lambda: trainer.model.kept is trainer.kept) in (True, (True, True))


@pytest.mark.parametrize("kind", [Ring, Recent])
def test_what_is_written_outside_reaches_all(strategy: Any, kind: Any) -> None:
    with strategy.scope():
        trainer = Trainer(kind(2))
    kept = trainer.kept
    strategy.run(trainer.step, args=(0,))
    kept.place = 7
    assert [place for _, place, _ in _kept(strategy, trainer)] == [7, 7]
    kept.averages.append(5.0)
    assert [averages[-1] for _, _, averages in _kept(strategy, trainer)] == [5.0, 5.0]
    kept.clear()
    assert [entries for entries, _, _ in _kept(strategy, trainer)] == [[], []]
    kept.place = 8  # while it is empty
    assert [place for _, place, _ in _kept(strategy, trainer)] == [8, 8]
    kept.append(torch.tensor(1.0))
    assert [entries for entries, _, _ in _kept(strategy, trainer)] == [[1.0], [1.0]]
    kept[0].fill_(2.0)
    assert [entries for entries, _, _ in _kept(strategy, trainer)] == [[2.0], [2.0]]


class Seen(set[int]):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def is_new(self, value: int) -> bool:
        self.asked += 1
        new = value not in self
        self.add(value)
        return new


def test_a_set_too(strategy: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Seen()

        def forward(self) -> bool:
            return self.seen.is_new(3)

    with strategy.scope():
        model = Counting()
    assert strategy.experimental_local_results(strategy.run(lambda: model())) in ((True,), (True, True))
    assert model.seen.asked == 1


def test_a_list_that_holds_itself_and_a_model(strategy: Any) -> None:
    with strategy.scope():
        trainer = Trainer(Ring(2))
        trainer.kept.append(trainer.kept)
        trainer.kept.trainer, trainer.kept.rate = trainer, torch.optim.SGD(trainer.model.parameters(), lr=0.1)

    def step() -> tuple[bool, bool]:
        trainer.kept.place += 1
        return trainer.kept[0] is trainer.kept, trainer.kept.trainer is trainer

    assert strategy.experimental_local_results(strategy.run(step)) in (((True, True),) * n for n in (1, 2))
    assert trainer.kept.place == 1


def test_one_whose_class_reads_its_entries_otherwise_is_shared(strategy: Any) -> None:
    class Halves(list[float]):
        def __getitem__(self, place: Any) -> Any:
            return super().__getitem__(place) / 2

    with strategy.scope():
        trainer = Trainer(Halves([4.0]))

    def step() -> float:
        trainer.kept.append(1.0)
        return trainer.kept[0]  # type: ignore[no-any-return]

    assert strategy.experimental_local_results(strategy.run(step)) in ((2.0,), (2.0, 2.0))
    assert len(trainer.kept) == 3
