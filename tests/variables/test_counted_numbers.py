"""Numbers that a step counts in a global or a ``nonlocal`` variable go on once for each replica, which is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core import logging

TWO = ["cpu:0", "cpu:1"]
_steps = 0
_loss = 0.0
_settings = {"calls": 0, "rate": 1.0, "loss": 0.0, "once": 0}


@pytest.fixture(params=[td.MirroredStrategy, td.experimental.CentralStorageStrategy])
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    logging._said.clear()
    with request.param(TWO) as strategy:
        yield strategy


def trainer(strategy: td.Strategy) -> Callable[[], None]:
    """A function that trains, with the calls that all replicas make in it."""
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return train


def said(caplog: pytest.LogCaptureFixture, name: str) -> int:
    return caplog.text.count(f"reads the variable {name!r} and then gives it another number")


def test_a_count_in_a_global_is_said(strategy: td.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    train = trainer(strategy)

    def step() -> None:
        global _steps, _loss
        train()
        _steps += 1
        _loss = 0.5 * _steps

    before = _steps
    for _ in range(3):
        strategy.run(step)
    assert _steps == before + 6
    assert said(caplog, "_steps") == 1
    assert f"for each of 2 replicas in one run, from {before} to {before + 2}" in caplog.text
    assert said(caplog, "_loss") == 0  # set, and not read


def test_numbers_of_a_closure(strategy: td.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    train = trainer(strategy)
    rate, runs, done, total, best, in_all = 1.0, 0, False, 0.0, None, 0

    def step() -> None:
        nonlocal rate, runs, done, total, best, in_all
        done = not done
        total = total + torch.ones(2)  # type: ignore[assignment]
        best = 1.0 if best is None else best
        context = td.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            runs += 1  # on one replica alone
        context.merge_call(lambda _: count())
        train()
        context.merge_call(lambda _: count())
        rate *= 0.5

    def count() -> None:
        nonlocal in_all
        in_all = in_all + 1

    for _ in range(3):
        strategy.run(step)
    assert (rate, runs, in_all) == (0.5**6, 3, 6)
    assert said(caplog, "rate") == 1
    assert [said(caplog, name) for name in ("runs", "done", "best", "in_all")] == [0] * 4


def test_entries_of_dicts_and_attributes_of_functions(strategy: td.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    train = trainer(strategy)
    settings, hidden = {3: 0}, {"state": torch.zeros(2)}

    def activation() -> None:
        activation.calls += 1  # type: ignore[attr-defined]
        activation.mean = 0.5 * activation.mean + 1.0  # type: ignore[attr-defined]

    activation.calls, activation.mean = 0, 0.0  # type: ignore[attr-defined]

    class Net(torch.nn.Module):
        def forward(self) -> None:
            _settings["calls"] += 1
            _settings["rate"] = 0.5 * _settings["rate"]
            _settings["loss"] = 0.1 * td.get_replica_context().replica_id_in_sync_group  # type: ignore[operator]
            settings[3] = settings.get(3, 0) + 1
            hidden["state"] = hidden["state"] + 1
            if td.get_replica_context().replica_id_in_sync_group == 0:
                _settings["once"] += 1

    with strategy.scope():
        net = Net()

    def step() -> None:
        net()
        activation()
        train()

    for _ in range(3):
        strategy.run(step)
    assert (settings, activation.calls) == ({3: 6}, 6)  # type: ignore[attr-defined]
    counted = ["_settings['calls']", "settings[3]", "activation.calls"]  # once for each dict and each function
    assert [said(caplog, name) for name in counted] == [1] * 3
    assert caplog.text.count("another number") == 3
    assert caplog.text.count("another tensor") == 1
    assert """reads the variable "hidden['state']" and then gives it another tensor""" in caplog.text


def test_a_dict_that_is_each_replicas_own_is_not_said(strategy: td.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        state: dict[str, Any] = {"model": torch.nn.Linear(2, 1), "step": 0}

    def step() -> None:
        state["step"] += 1
        state["model"](torch.ones(1, 2)).sum().backward()

    for _ in range(3):
        strategy.run(step)
    assert state["step"] == 3
    assert "another number" not in caplog.text


def test_one_replica_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logging._said.clear()
    count = 0

    def step() -> None:
        nonlocal count
        count += 1

    with td.MirroredStrategy(TWO[:1]) as strategy:
        strategy.run(step)
    assert count == 1
    assert said(caplog, "count") == 0


def test_an_attribute_counts_for_each_replica(strategy: td.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    """What the message says to write."""
    with strategy.scope():
        model = torch.nn.Linear(2, 1)

    class Loop:
        def __init__(self) -> None:
            self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
            self.steps: Any = 0

        def step(self) -> None:
            self.steps += 1

    loop = Loop()
    for _ in range(3):
        strategy.run(loop.step)
    assert loop.steps == 3
    assert "another number" not in caplog.text


@pytest.mark.parametrize("call", ["before", "after"])
def test_a_tensor_is_watched_through_the_whole_run(
    strategy: td.Strategy, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a call in whose middle the objects are those of cross-replica context."""
    train = trainer(strategy)
    hidden, total, once = torch.zeros(1), torch.zeros(3), torch.zeros(5)

    def step() -> None:
        nonlocal hidden
        context = td.get_replica_context()
        if call == "before":
            context.merge_call(lambda _: once.add_(1))
        train()
        hidden = hidden + 1
        total.add_(1)
        if call == "after":
            context.merge_call(lambda _: once.add_(1))

    strategy.run(step)
    assert "reads the variable 'hidden' and then gives it another tensor" in caplog.text
    assert "wrote to a tensor of shape (3,)" in caplog.text
    assert "wrote to a tensor of shape (5,)" not in caplog.text  # once for all
