"""Settings of the program in which a step of a module counts, shared by the replicas of a process."""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as td

SAID = "was changed by replica 0 and then by replica 1"

pytestmark = pytest.mark.usefixtures("nothing_said_yet")


class Table(dict[str, Any]):
    """A dict of a class of its own, which may do more than a dict does."""


class Attributes(dict[str, Any]):
    """A dict whose entries are read as attributes, as many programs have one."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Model(torch.nn.Module):
    """Keeps its settings as most programs do, and does something with them in ``forward``."""

    def __init__(self, settings: Any, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.settings, self.change = settings, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.settings)
        return self.layer(x).sum()  # type: ignore[no-any-return]


def trained(strategy: td.Strategy, settings: Any, change: Callable[[Any], None], runs: int = 3) -> None:
    with strategy, strategy.scope():
        model = Model(settings, change)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).backward()
            optimizer.step()

        for _ in range(runs):
            strategy.run(step)


def two_replicas() -> td.Strategy:
    return td.MirroredStrategy(["cpu:0", "cpu:1"])


def anneal(settings: Any) -> None:
    settings.tau *= 0.5


def count(settings: Any) -> None:
    settings["calls"] += 1


def anneal_within(settings: Any) -> None:
    settings.loss.tau *= 0.5


def use(array: Any) -> None:
    array[1] += 1


def count_within(settings: Any) -> None:
    settings["loss"]["calls"] += 1


COUNTING = [
    (lambda: Table(calls=1), count, "'calls' in Model.settings "),
    (lambda: Table(loss=Table(calls=1)), count_within, r"'calls' in Model.settings\.loss "),
    (lambda: np.zeros(4)[:3], use, "numpy array attribute 'settings' of Model .*register_buffer"),
    (lambda: np.array([np.nan, 0.0, 1.0])[:2], use, "numpy array attribute 'settings' of Model "),
    (lambda: itertools.count(), next, "iterator attribute 'settings' of Model .*self.calls"),
    (lambda: iter([0.1] * 20), next, "iterator attribute 'settings' of Model "),
    (lambda: iter(range(20)), next, "iterator attribute 'settings' of Model "),
]
OWN: list[tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any], Any]] = [
    (lambda: argparse.Namespace(tau=1.0), anneal, lambda s: s.tau, 0.125),
    (lambda: types.SimpleNamespace(tau=1.0), anneal, lambda s: s.tau, 0.125),
    (lambda: Attributes(tau=1.0), anneal, lambda s: s.tau, 0.125),
    (lambda: argparse.Namespace(loss=Attributes(tau=1.0)), anneal_within, lambda s: s.loss.tau, 0.125),
    (lambda: types.SimpleNamespace(loss=types.SimpleNamespace(tau=1.0)), anneal_within, lambda s: s.loss.tau, 0.125),
    (lambda: collections.Counter(calls=1), count, lambda s: s["calls"], 4),
    (lambda: np.zeros(3), use, lambda s: s[1], 3.0),
    (lambda: np.zeros(3, dtype=np.int32), use, lambda s: s[1], 3),
]


@pytest.mark.parametrize("strategy", [two_replicas, lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])])
@pytest.mark.parametrize(("settings", "change", "read", "last"), OWN)
def test_settings_that_are_each_replicas_own(
    strategy: Callable[[], td.Strategy],
    settings: Callable[[], Any],
    change: Callable[[Any], None],
    read: Callable[[Any], Any],
    last: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = settings()
    found: list[Any] = []

    def change_and_note(settings: Any) -> None:
        change(settings)
        found.append(read(settings))

    trained(strategy(), own, change_and_note)
    assert found[-2:] == [last, last]
    assert read(own) == last or isinstance(own, collections.Counter)
    assert SAID not in caplog.text


@pytest.mark.parametrize("strategy", [two_replicas, lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])])
@pytest.mark.parametrize(("settings", "change", "which"), COUNTING)
def test_a_step_that_counts_in_settings_is_said_once(
    strategy: Callable[[], td.Strategy],
    settings: Callable[[], Any],
    change: Callable[[Any], None],
    which: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(strategy(), settings(), change)
    messages = [record.message for record in caplog.records if SAID in record.message]
    assert len(messages) == 1
    assert re.search(which, messages[0])


def test_settings_that_are_found_later_or_change_later(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def count_in_the_end(settings: Any) -> None:
        calls.append(0)
        if len(calls) > 8:
            count(settings)

    trained(two_replicas(), Table(calls=1), count_in_the_end, runs=5)
    assert SAID in caplog.text


def set_once(settings: Any) -> None:
    settings["calls"] = 5
    settings["seen"] = True


def leave_alone(settings: Any) -> None:
    del settings


def keep_for_each(settings: Any) -> None:
    settings["losses"] = [*settings.get("losses", ()), 1.0]


@pytest.mark.parametrize("change", [set_once, leave_alone, keep_for_each])
def test_nothing_is_said_where_no_number_advances(change: Callable[[Any], None], caplog: Any) -> None:
    trained(two_replicas(), Table(calls=1), change)
    assert SAID not in caplog.text


def test_settings_that_each_replica_makes_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    class OfItsOwn(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = td.get_replica_context()
            assert context is not None
            self.settings = argparse.Namespace(number=context.replica_id_in_sync_group)
            return super().forward(x)

    with two_replicas() as strategy:
        with strategy.scope():
            model = OfItsOwn(argparse.Namespace(number=7), leave_alone)
        for _ in range(3):
            strategy.run(lambda: model(torch.ones(1, 2)).backward())
    assert SAID not in caplog.text


def write_its_own(array: Any) -> None:
    context = td.get_replica_context()
    assert context is not None
    array[context.replica_id_in_sync_group] += 1


def write_the_same(array: Any) -> None:
    array[:] = 5


@pytest.mark.parametrize("change", [write_its_own, write_the_same, leave_alone])
def test_arrays_in_which_no_element_advances_twice(change: Callable[[Any], None], caplog: Any) -> None:
    trained(two_replicas(), np.array([0.0, 0.0, np.nan, 1.0])[:3], change)
    assert SAID not in caplog.text


class Odd(argparse.Namespace):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return types.MappingProxyType({"tau": 1.0})


@pytest.mark.parametrize("beside", [np.zeros(3), itertools.count(), iter([1])], ids=["array", "count", "iterator"])
def test_settings_beside_arrays_and_iterators(beside: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What is no settings itself kept everything from being looked at."""
    trained(two_replicas(), Table(beside=beside, calls=1), count)
    assert SAID in caplog.text


class OddArray(np.ndarray[Any, Any]):
    """Cannot be compared or written out."""

    def __ne__(self, other: object) -> Any:
        raise RuntimeError

    __eq__ = tobytes = copy = __ne__


def test_arrays_of_odd_classes(caplog: pytest.LogCaptureFixture) -> None:
    trained(two_replicas(), np.zeros(3).view(OddArray), use)
    assert SAID in caplog.text


def test_settings_that_cannot_be_looked_into_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    for settings in (
        Attributes(tau=10**5000),
        argparse.Namespace(odd=Odd()),
        Odd(),
        Attributes.fromkeys(range(2000), 1),
    ):
        trained(two_replicas(), settings, leave_alone)
    assert SAID not in caplog.text


class Counting(torch.nn.Module):
    """Counts in attributes of its class, and in one of its own."""

    calls, last, own, depth = 0, 0.0, 0, 3

    def forward(self) -> None:
        type(self).calls += 1
        type(self).last = float(self.depth)
        self.own += 1


@pytest.mark.parametrize("kind", [td.MirroredStrategy, td.experimental.CentralStorageStrategy])
def test_numbers_of_the_class_of_a_module(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = Counting.calls
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = Counting()
        for _ in range(3):
            strategy.run(model)
        assert (Counting.calls - before, model.own) == (6, 3)
    assert f"The setting 'calls' in the class Counting {SAID}" in caplog.text
    assert caplog.text.count(SAID) == 1
