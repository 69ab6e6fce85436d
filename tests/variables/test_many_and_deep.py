"""Sizes of other people's programs: chains of objects, lists that grow or are long, many buffers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from this_replica import replica
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core import logging, torch_internals
from tfstyle_dist.variables.content import copies
from tfstyle_dist.variables.store import ParameterStore

LONG = copies.MOST_ENTRIES + 1


@pytest.fixture
def strategy() -> Iterator[td.MirroredStrategy]:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


class Entry:
    """Of a list whose entries know each other, as caches and trees of search have them."""

    def __init__(self, before: Entry | None) -> None:
        self.seen, self.before, self.after = 0, before, None
        if before is not None:
            before.after = self  # type: ignore[assignment]


def test_a_chain_of_objects_may_be_longer_than_pythons_stack(strategy: td.MirroredStrategy) -> None:
    with strategy.scope():
        module = nn.Linear(1, 1)
    module.last = last = Entry(None)
    for _ in range(2000):
        module.last = Entry(module.last)

    def step() -> tuple[int, int]:
        for one in (module.last, last):
            one.seen += 1 + replica()
        return module.last.seen, last.seen

    strategy.run(step)
    assert strategy.experimental_local_results(strategy.run(step)) == ((2, 2), (4, 4))
    last.seen = 10
    assert strategy.experimental_local_results(strategy.run(step)) == ((3, 11), (6, 12))


KINDS: dict[str, tuple[Any, Callable[[Any, object], Any]]] = {
    "list": (list(range(LONG)), list.append),
    "deque": (deque(range(LONG), maxlen=LONG), deque.append),
    "dict": (dict.fromkeys(range(LONG)), dict.setdefault),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_adds_to_what_counts_as_data_is_told(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(logging, "_said", set())
    with strategy.scope():
        module = nn.Linear(1, 1)
    history, add = KINDS[kind]
    module.history = copy.copy(history)
    for _ in range(2):
        strategy.run(lambda: None)
        add(module.history, object())
    strategy.run(lambda: None)
    assert not caplog.records  # between runs it may be changed
    for _ in range(3):
        strategy.run(lambda: add(module.history, object()))
    (said,) = caplog.messages
    assert f"Linear.history, a {kind} of" in said
    assert "which the replicas of one process share" in said


@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "outside"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_as_data_may_be_emptied(strategy: td.MirroredStrategy, kind: str, inside: bool) -> None:
    with strategy.scope():
        module = nn.Linear(1, 1)
    for _ in range(2):
        module.history = copy.copy(KINDS[kind][0])
        for _ in range(2):
            strategy.run(lambda: len(module.history))
        if inside:
            strategy.run(lambda: module.history.clear())
        else:
            module.history.clear()
        strategy.run(lambda: module.history.clear() if module.history else None)
        assert not module.history


def test_a_long_list_that_is_each_replicas_own_may_grow(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy.scope():
        module = nn.Linear(1, 1)
    module.history = [0] * (LONG - 2)

    def step() -> int:
        module.history.append(1)
        return len(module.history)

    for expected in range(LONG - 1, LONG + 4):
        assert strategy.experimental_local_results(strategy.run(step)) == (expected, expected)
    assert not caplog.records


def test_a_metric_keeps_a_list_of_any_length(strategy: td.MirroredStrategy) -> None:
    with strategy.scope():
        metric = torchmetrics.CatMetric()
    metric.value = [torch.ones(1)] * LONG  # as after a restore
    for _ in range(2):
        strategy.run(lambda: metric.update(torch.full((1,), float(replica()))))
    computed = metric.compute()
    assert len(computed) == LONG + 4
    assert computed.sum() == LONG + 2


def test_what_a_metric_keeps_is_not_looked_at_in_each_run(
    strategy: td.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        metric = torchmetrics.CatMetric()
    for _ in range(100):
        strategy.run(lambda: metric.update(torch.ones(1)))
    looks = []
    version = torch_internals.version_of
    monkeypatch.setattr(torch_internals, "version_of", lambda value: looks.append(1) or version(value))
    strategy.run(lambda: metric.update(torch.ones(1)))
    assert len(looks) < 50
    assert len(metric.compute()) == 202


def test_a_checkpoint_looks_once_at_all_that_was_written_outside(
    strategy: td.MirroredStrategy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with strategy.scope():
        module = nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(20)))
    settled = []
    settle = ParameterStore.settle
    monkeypatch.setattr(ParameterStore, "settle", lambda store: settled.append(1) or settle(store))
    checkpoint = td.train.Checkpoint(model=module)
    strategy.run(lambda: module(torch.randn(4, 1) + replica()).sum())
    module[3].running_mean.fill_(7.0)  # type: ignore[operator, union-attr]
    path = checkpoint.write(str(tmp_path / "c"))
    assert len(settled) < 10
    assert td.train.load_checkpoint(path).get_tensor("model/3.running_mean") == 7.0
