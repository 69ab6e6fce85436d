"""Helpers and states of unusual classes, and those that are replaced, resized, or used by no step."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import OrderedDict
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from this_replica import replica
from torch import nn
from until import wait_until_gone

import tfstyle_dist as td


class Meter:
    """A mean, counted in an array and a number."""

    def __init__(self, total: Any = None) -> None:
        self.total, self.count = np.zeros(1) if total is None else total, 0

    def add(self) -> None:
        array = self.total["sum"] if isinstance(self.total, dict) else self.total
        array += 1.0
        self.count += 1

    def mean(self) -> float:
        array = self.total["sum"] if isinstance(self.total, dict) else self.total
        return float(array[0]) / self.count


class Box(dict[str, Any]):
    """Its entries are read as those of any dict, so the replicas share them."""


class Trainer:
    def __init__(self, strategy: Any, *held: Any) -> None:
        with strategy.scope():
            self.model = nn.Linear(2, 1)
        self.held: list[Any] = list(held)


def test_many_helpers_with_arrays_count_as_one_does(strategy: Any) -> None:
    trainer = Trainer(strategy, *[Meter() for _ in range(80)])
    for _ in range(3):
        strategy.run(lambda: [meter.add() for meter in trainer.held])
    assert [(meter.count, meter.mean()) for meter in trainer.held] == [(3, 1.0)] * 80


def test_a_helper_whose_array_is_shared_is_shared_as_a_whole(strategy: Any) -> None:
    trainer = Trainer(strategy, Meter(Box(sum=np.zeros(1))))
    for _ in range(3):
        strategy.run(lambda: trainer.held[0].add())
    assert trainer.held[0].mean() == 1.0


def test_an_array_may_be_resized_and_get_another_form(strategy: Any) -> None:
    trainer = Trainer(strategy)
    trainer.own = np.zeros(4)

    def step(shape: tuple[int, ...] = (4,)) -> float:
        trainer.own.shape = shape
        trainer.own += 1 + replica()
        return float(trainer.own.reshape(-1)[0])

    strategy.run(step)
    results = strategy.experimental_local_results(strategy.run(lambda: step((2, 2))))
    assert [float(value) for value in results] == [2.0, 4.0]
    trainer.own.shape = (4,)
    trainer.own.resize(6, refcheck=False)
    trainer.own[:] = 10.0
    results = strategy.experimental_local_results(strategy.run(lambda: step((6,))))
    assert [float(value) for value in results] == [11.0, 12.0]


def test_an_array_that_nobody_holds_is_let_go(strategy: Any) -> None:
    trainer = Trainer(strategy)
    trainer.own = np.zeros(4)
    strategy.run(lambda: float(trainer.own[0]))
    kept = strategy.parameter_store.contents._inside.kept
    assert len(kept) == 1
    del kept, trainer.own
    for _ in range(3):
        strategy.run(lambda: trainer.model)
    assert strategy.parameter_store.contents._inside.kept == []


def test_a_closed_strategy_holds_no_arrays(strategy: Any) -> None:
    trainer = Trainer(strategy)
    trainer.own = np.zeros(4)
    strategy.run(lambda: float(trainer.own[0]))
    known, contents = weakref.ref(trainer.own), strategy.parameter_store.contents
    strategy.close()
    contents.release()
    del trainer.own
    wait_until_gone(known)


def test_what_only_slots_in_a_dict_lead_to_is_each_replicas_own(strategy: Any) -> None:
    class Slot:
        __slots__ = ("norm",)

        def __init__(self) -> None:
            self.norm = nn.BatchNorm1d(2)

    state = {"model": Trainer(strategy).model, "slot": Slot()}
    norm: Any = state["slot"]
    for _ in range(3):
        strategy.run(lambda: state["slot"].norm(torch.ones(4, 2)) is None)  # type: ignore[attr-defined]
    assert int(norm.norm.num_batches_tracked) == 3


def test_an_ordered_dict_keeps_the_order_that_a_step_gave_it(strategy: Any) -> None:
    state = OrderedDict(model=Trainer(strategy).model, a=1, b=2)

    def step() -> str:
        state.move_to_end("a")
        td.get_replica_context().all_reduce("SUM", torch.ones(1))  # the turn passes and comes back
        return "-".join(state)

    for value in strategy.experimental_local_results(strategy.run(step)):
        assert value == "model-b-a"
    assert list(state) == ["model", "b", "a"]


def test_a_list_with_modules_is_one_object_under_all_its_names(strategy: Any) -> None:
    class Population(list[Any]):
        best = 0

    population = Population([1])
    population.net = nn.Linear(1, 1)  # type: ignore[attr-defined]
    trainer = Trainer(strategy, population)

    def step() -> tuple[int, bool]:
        population.best += replica() + 1
        return trainer.held[0].best, trainer.held[0] is population

    strategy.run(step)
    found = strategy.run(lambda: str(step()))
    assert strategy.experimental_local_results(found) == ("(2, True)", "(4, True)")


class EmptySlots(list[Any]):
    __slots__ = ()


class Loads:
    """As a module that loads itself when it is asked for something."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"loaded for {name}")


class WithUnusualAttributes:
    lazy = Loads()

    def __init__(self, strategy: Any) -> None:
        self.model, self.stack = Trainer(strategy).model, EmptySlots([1])
        self.model.pretended = mock.MagicMock(spec=dict)

    def step(self) -> int:
        return len(self.stack)

    wrapped = functools.wraps(step)(lambda self: 0)


WithUnusualAttributes.wrapped.__wrapped__ = WithUnusualAttributes.wrapped  # type: ignore[attr-defined]


def test_unusual_attributes_are_left_alone(strategy: Any) -> None:
    thing = WithUnusualAttributes(strategy)
    assert strategy.experimental_local_results(strategy.run(thing.step)) in ((1,), (1, 1))


METER = Meter()
UNUSED = Meter()


class AsksAGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        METER.add()
        return super().forward(x)

    def evaluate(self) -> float:
        return UNUSED.mean()


def test_a_global_that_is_another_object_later_is_found_again(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with strategy.scope():
        model = AsksAGlobal(2, 1)
    for _ in range(3):
        monkeypatch.setitem(globals(), "METER", Meter())
        for _ in range(2):
            strategy.run(lambda: model(torch.ones(1, 2)))
        assert METER.count == 2


def test_what_only_the_rest_of_the_program_calls_is_not_looked_at(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may name a teacher or a corpus, of which each replica would have a copy."""
    monkeypatch.setitem(globals(), "UNUSED", Meter())
    with strategy.scope():
        model = AsksAGlobal(2, 1)
    strategy.run(lambda: model(torch.ones(1, 2)))
    assert not strategy.parameter_store.contents.holds(UNUSED)
    strategy.run(lambda: model.evaluate if model.training else None)
    assert strategy.parameter_store.contents.holds(UNUSED)


def test_a_dict_that_is_given_to_run_is_not_copied(strategy: Any) -> None:
    model, data = Trainer(strategy).model, torch.ones(100)
    seen: list[int] = []

    def step(given: dict[str, Any]) -> None:
        seen.append(given["data"].data_ptr())

    strategy.run(step, args=({"model": model, "data": data},))
    assert set(seen) == {data.data_ptr()}


def test_a_dict_that_is_its_own_attributes_is_let_go(strategy: Any) -> None:
    class Attributes(dict[str, Any]):
        def __init__(self, **entries: Any) -> None:
            super().__init__(**entries)
            self.__dict__ = self

    def trial() -> weakref.ref[nn.Module]:
        state = Attributes(model=Trainer(strategy).model, step=0)

        def step() -> None:
            state.step += 1

        strategy.run(step)
        assert state["step"] == 1
        return weakref.ref(state.model)

    models = [trial() for _ in range(3)]
    for _ in range(2):
        strategy.run(lambda: None)
        gc.collect()
    assert [model() for model in models] == [None] * 3


class NameEachOther:
    def first(self) -> Any:
        return self.second

    def second(self) -> Any:
        return self.first


def test_methods_may_name_each_other(strategy: Any) -> None:
    trainer = Trainer(strategy, NameEachOther())
    strategy.run(lambda: str(trainer.model))
    strategy.run(lambda: str((trainer.held[0].first, trainer.held[0].second)))


STATE: dict[str, Any] = {}


class AsksAState:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> int:
        STATE["step"] += 1
        return int(STATE["step"])


def test_a_state_that_an_argument_asks_for_is_each_replicas_own(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trainer(strategy).model
    monkeypatch.setitem(globals(), "STATE", {"model": model, "step": 0})
    for number in (1, 2):
        found = strategy.run(lambda ask: str(ask()), args=(AsksAState(model),))
        assert set(strategy.experimental_local_results(found)) == {str(number)}


def test_hooks_that_come_and_go_leave_nothing(strategy: Any) -> None:
    model = Trainer(strategy).model

    def step() -> None:
        seen, counts = torch.zeros(1), 0

        def hook(*_: Any) -> None:
            nonlocal counts
            counts += int(seen.sum())

        model.register_forward_hook(hook).remove()

    handles = []
    for _ in range(5):
        seen = torch.zeros(1)
        handles.append(model.register_forward_hook(lambda *_, seen=seen: None))
        strategy.run(step)
        handles.pop().remove()
    del seen
    strategy.run(step)
    gc.collect()
    strategy.run(step)
    discovery = strategy.parameter_store.contents.discovery
    assert len(discovery._known_tensors) <= 1
    assert len(discovery._known_carrying) == 0


def test_attributes_of_a_buffer_are_each_replicas_own(strategy: Any) -> None:
    with strategy.scope():
        model = nn.BatchNorm1d(2)
        model.kept = [torch.zeros(1)]
        for tensor in (model.running_mean, model.kept[0]):
            tensor.counts, tensor.seen = {"calls": 0}, "mean"

    def step() -> tuple[int, str]:
        for tensor in (model.running_mean, model.kept[0]):
            tensor.counts["calls"] += 1
            tensor.seen += str(replica())
        return model.kept[0].counts["calls"], model.running_mean.seen

    for _ in range(2):
        found = strategy.run(step)
    assert strategy.experimental_local_results(found) == ((2, "mean00"), (2, "mean11"))
    assert model.running_mean.counts == {"calls": 2}


class WithBest(nn.Module):
    """Keeps copies of what had the least loss, each with what it counted then."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.best, self.least = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), None, float("inf")

    def look(self, loss: float) -> None:
        if loss < self.least:
            self.least, self.best = loss, copy.deepcopy(self.net).requires_grad_(False)


def test_a_frozen_copy_that_a_step_keeps_is_each_replicas_own() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = WithBest()
            optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        losses, found = ([4.0, 3.0], [2.0, 9.0], [9.0, 9.0], [9.0, 1.0], [9.0, 9.0]), []

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            model.net(torch.tensor([[0.0, 1.0], [2.0, 1.0]])).square().sum().backward()
            optimizer.step()
            model.look(losses[number][replica()])
            assert model.best is not None
            return torch.cat([p.detach().reshape(-1) for p in (*model.best.parameters(), *model.best.buffers())])

        for number in range(5):
            found.append(strategy.experimental_local_results(strategy.run(step, args=(number,))))
        first, second = zip(*found, strict=True)
        assert torch.equal(first[0], second[0])
        assert [torch.equal(one, other) for one, other in pairwise(first)] == [False, True, True, True]
        assert [torch.equal(one, other) for one, other in pairwise(second)] == [True, True, False, True]


def test_a_kept_copy_is_trained_as_a_copy_for_all(strategy: Any) -> None:
    with strategy.scope():
        model = WithBest()
    strategy.run(lambda: model.look(1.0 + replica()))
    model.best.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="each replica has one of its own in its place"):
        strategy.experimental_adopt(model.best)
    with strategy.scope():
        model.best = copy.deepcopy(model.best)
    optimizer = torch.optim.SGD(model.best.parameters(), lr=0.1)  # type: ignore[union-attr]

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        model.best[0](torch.full((1, 2), 1.0 + replica())).sum().backward()  # type: ignore[index]
        optimizer.step()
        return model.best[0].weight.grad.clone()  # type: ignore[index, no-any-return]

    for gradient in strategy.experimental_local_results(strategy.run(step)):
        assert gradient.tolist() == [[1.5, 1.5]]
