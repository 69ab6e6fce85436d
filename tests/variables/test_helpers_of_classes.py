"""Objects that a class of the program has: its only one, descriptors that count, plugins that it lists."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import nn


class Schedule:
    count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count


def _only() -> Callable[[], int]:
    class Only(Schedule):
        made = None

        def __new__(cls) -> Any:
            if cls.made is None:
                cls.made = super().__new__(cls)
            return cls.made

    return lambda: Only().tick()


def _only_by_its_class() -> Callable[[], int]:
    class Kinds(type):
        made: ClassVar[dict[type, Any]] = {}

        def __call__(cls) -> Any:
            return cls.made.setdefault(cls, None) or cls.made.update({cls: super().__call__()}) or cls.made[cls]

    class Only(Schedule, metaclass=Kinds):
        pass

    return lambda: Only().tick()


def _attribute() -> Callable[[], int]:
    class Settings:
        schedule = Schedule()

    return lambda: Settings.schedule.tick()


def _list() -> Callable[[], int]:
    class Plugin(Schedule):
        all: ClassVar[list[Schedule]] = []

        def __init_subclass__(cls) -> None:
            Plugin.all.append(cls())

    class One(Plugin):
        pass

    return lambda: Plugin.all[0].tick()


def _of_an_object() -> Callable[[], int]:
    class Trainer:
        schedule = Schedule()

        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)

        def step(self) -> int:
            return self.schedule.tick()

    return Trainer().step


def _decorator() -> Callable[[], int]:
    class Counted(Schedule):
        def __init__(self, function: Any) -> None:
            self.function = function

        def __get__(self, trainer: Any, kind: Any) -> Any:
            return self if trainer is None else functools.partial(self.function, trainer, self.tick())

    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)

        @Counted
        def step(self, count: int) -> int:
            return count

    trainer = Trainer()
    return lambda: trainer.step()  # type: ignore[no-any-return]


def _descriptor() -> Callable[[], int]:
    class Counter:
        def __init__(self) -> None:
            self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

        def __get__(self, trainer: Any, kind: Any) -> Any:
            if trainer is None:
                return self
            self.counts[trainer] = self.counts.get(trainer, 0) + 1
            return self.counts[trainer]

    class Trainer:
        count = Counter()

        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)

        def step(self) -> int:
            return int(self.count)

    return Trainer().step


MADE = (_only, _only_by_its_class, _attribute, _list, _of_an_object, _decorator, _descriptor)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__.strip("_"))
def test_they_are_each_replicas_own(strategy: Any, make: Callable[[], Callable[[], int]]) -> None:
    with strategy.scope():
        step = make()
    if make in (_only, _only_by_its_class):
        step()  # makes it
    before = 1 if make in (_only, _only_by_its_class) else 0
    for _ in range(3):
        counts = strategy.experimental_local_results(strategy.run(step))
    assert tuple(counts) in ((3 + before,), (3 + before,) * 2)


def test_one_that_the_program_makes_between_runs(strategy: Any) -> None:
    class Settings:
        schedule: Any = None

    def step() -> int:
        return 0 if Settings.schedule is None else Settings.schedule.tick()

    strategy.run(step)
    Settings.schedule = Schedule()
    for _ in range(3):
        counts = strategy.experimental_local_results(strategy.run(step))
    assert tuple(counts) in ((3,), (3, 3))
