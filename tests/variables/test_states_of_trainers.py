"""Dicts and namespaces in which a trainer keeps its model and what it counts, and arrays of its helpers."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from this_replica import replica
from torch import nn
from until import wait_until_gone

import tfstyle_dist as td


def model_of(strategy: Any) -> nn.Linear:
    with strategy.scope():
        return nn.Linear(2, 1)


def local(strategy: Any, step: Any) -> tuple[Any, ...]:
    """What the replicas return; one value where it is the same object."""
    result: tuple[Any, ...] = strategy.experimental_local_results(strategy.run(step))
    return result * 2 if len(result) == 1 else result


def default(**entries: Any) -> Any:
    made: Any = defaultdict(int)
    made.update(entries)
    return made


@pytest.mark.parametrize("kind", [dict, OrderedDict, default])
@pytest.mark.parametrize("where", ["model", "list", "dict", "optimizer"])
def test_a_dict_with_a_module_or_an_optimizer_is_each_replicas_own(strategy: Any, where: str, kind: Any) -> None:
    model = model_of(strategy)
    held = {
        "model": lambda: model,
        "list": lambda: [model],
        "dict": lambda: {"net": model},
        "optimizer": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
    }[where]()
    state = kind(held=held, step=0, seen=[])

    def step() -> tuple[int, int, list[int], int]:
        state["step"] += 1
        state["late"] = state.get("late", 0) + 1 + replica()
        model(torch.ones(1, 2)).sum().backward()
        state["seen"].append(replica())
        return state["step"], state["late"], list(state["seen"]), len(state)

    for _ in range(3):
        found = local(strategy, step)
    assert found == ((3, 3, [0, 0, 0], 4), (3, 6, [1, 1, 1], 4))
    assert (state["step"], state["late"], state["seen"], state["held"]) == (3, 3, [0, 0, 0], held)
    state["step"] = 10
    del state["late"]
    assert local(strategy, step) == ((11, 1, [0, 0, 0, 0], 4), (11, 2, [1, 1, 1, 1], 4))


def test_other_dicts_and_lists_of_the_program_are_shared(strategy: Any) -> None:
    model, totals = model_of(strategy), {"count": 0, "all": []}
    locked = {"model": model, "array": np.zeros(2000), "count": 0}
    numbered = {0: model, 1: 0}

    def step() -> None:
        totals["count"] += 1
        totals["all"].append(replica())
        locked["count"] += 1
        numbered[1] += 1

    strategy.run(step)
    assert (totals, locked["count"], numbered[1]) == ({"count": 2, "all": [0, 1]}, 2, 2)


def test_a_dict_may_be_iterated_over_where_the_turn_passes(strategy: Any) -> None:
    nets = {name: model_of(strategy) for name in "abcd"}
    del nets["b"]

    def step() -> list[str]:
        seen = []
        for name, net in nets.items():
            net(torch.ones(1, 2)).sum().backward()
            seen.append(name)
        return seen

    assert local(strategy, step) == (["a", "c", "d"], ["a", "c", "d"])


def test_a_namespace_that_has_no_module(strategy: Any) -> None:
    model = model_of(strategy)
    state = types.SimpleNamespace(step=0, inner=types.SimpleNamespace(best=None))

    def step() -> tuple[int, Any]:
        state.step += 1
        state.inner.best = model(torch.full((1, 2), float(replica()))).shape[0] * replica()
        return state.step, state.inner.best

    strategy.run(step)
    assert local(strategy, step) == ((2, 0), (2, 1))
    assert (state.step, state.inner.best) == (2, 0)


def test_after_an_error_all_go_on_with_what_the_first_replica_has(strategy: Any) -> None:
    state = types.SimpleNamespace(model=model_of(strategy), step=0, sums=np.zeros(2))

    def step(fails: bool = False) -> tuple[int, float]:
        state.step += 1 + replica()
        state.sums += 1 + replica()
        if fails:
            raise ValueError("no")
        return state.step, float(state.sums[0])

    assert local(strategy, step) == ((1, 1.0), (2, 2.0))
    with pytest.raises(ValueError, match="no"):
        strategy.run(step, args=(True,))
    assert (state.step, state.sums.tolist()) == (2, [2.0, 2.0])
    assert local(strategy, step) == ((3, 3.0), (4, 4.0))


@pytest.mark.parametrize("kind", [dict, types.SimpleNamespace])
def test_nothing_keeps_a_state_that_the_program_drops(strategy: Any, kind: Any) -> None:
    def used(kept: bool) -> tuple[Any, Any]:
        state = kind(model=nn.Linear(2, 1), step=0)
        model = state["model"] if kind is dict else state.model
        strategy.run(lambda: state if kept else model(torch.ones(1, 2)).sum().item() * len(str(state)))
        return weakref.ref(model), state if kept else None

    gone, _ = used(False)
    there, state = used(True)
    strategy.run(lambda: None)
    wait_until_gone(gone)
    assert there() is not None
    del state


class Running:
    """The mean of what it sees."""

    def __init__(self) -> None:
        self.mean, self.count = np.zeros(2), 0
        self.draws = np.random.default_rng(0)

    def update(self, value: float) -> list[float]:
        self.count += 1
        self.mean += (value - self.mean) / self.count
        return [*self.mean.tolist(), self.count]


@pytest.mark.parametrize("trainer", [False, True])
def test_arrays_of_a_helper_are_each_replicas_own(strategy: Any, trainer: bool) -> None:
    model, running = model_of(strategy), Running()
    if trainer:
        running.model = model  # type: ignore[attr-defined]
    view = running.mean[1:]

    def step() -> tuple[list[float], float, float]:
        found = running.update(1.0 + replica())
        model(torch.ones(1, 2)).sum().backward()
        view[0] += 1
        return found, float(view[0]), float(running.draws.random())

    first, other = local(strategy, step)
    assert first[:2] == ([1.0, 1.0, 1], 2.0)
    assert other == ([2.0, 2.0, 1], 3.0, first[2])
    running.mean[:] = 7
    first, other = local(strategy, step)
    assert first[0] == [4.0, 4.0, 2]
    assert other[0] == [4.5, 4.5, 2]
    assert running.mean.tolist() == [4.0, 5.0]
    running.mean = np.full(2, 1.0)
    assert [found[0][0] for found in local(strategy, step)] == [1.0, pytest.approx(4 / 3)]


def test_many_arrays_and_those_that_change_their_shape(strategy: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.model = model_of(strategy)
            self.arrays = [np.zeros(1) for _ in range(200)]
            self.growing = np.zeros(2)

    holder = Holder()

    def step() -> list[float]:
        holder.arrays[0] += 1
        holder.arrays[-1] += 1
        if holder.growing.size == 2:
            holder.growing.resize(3, refcheck=False)
        holder.growing += 1 + replica()
        return [float(holder.arrays[0][0]), float(holder.growing[0])]

    strategy.run(step)
    assert [found[0] for found in local(strategy, step)] == [2.0, 2.0]
    assert float(holder.arrays[-1][0]) == 2.0
    strategy.run(lambda: holder.growing.setflags(write=False))
    strategy.run(lambda: None)


def test_an_array_that_the_step_names_is_shared(strategy: Any) -> None:
    counts, held = np.zeros(2), [np.zeros(2)]

    def step() -> None:
        counts[replica()] += 1
        held[0][replica()] += 1

    strategy.run(step)
    assert (counts.tolist(), held[0].tolist()) == ([1.0, 1.0], [1.0, 1.0])


_state: dict[str, Any] = {}


@pytest.mark.parametrize("named", ["closure", "global", "itself"])
def test_an_object_that_has_the_dict_has_the_same(strategy: Any, named: str) -> None:
    class Scheduled:
        def __init__(self, state: dict[str, Any]) -> None:
            self.model, self.state = state["model"], state

        def last(self) -> int:
            return int(self.state["step"])

    model, own = model_of(strategy), {}  # type: ignore[var-annotated]
    state = _state if named == "global" else own
    state.clear()
    state.update(model=model, step=0)
    a_trainer = Scheduled(state)
    if named == "itself":
        state["state"] = state

    def step() -> tuple[int, int]:
        used = _state if named == "global" else own.get("state", own)
        used["step"] += 1 + replica()
        return a_trainer.last(), state["step"]

    strategy.run(step)
    assert local(strategy, step) == ((2, 2), (4, 4))
    _state.clear()


def test_a_namespace_is_adopted(strategy: Any) -> None:
    space = strategy.experimental_adopt(types.SimpleNamespace(count=0))

    def add(space: Any = space) -> int:
        space.count += 1
        return int(space.count)

    assert local(strategy, add) == (1, 1)
    with pytest.raises(TypeError, match="got dict"):
        strategy.experimental_adopt({"count": 0})


def test_states_when_the_strategy_is_gone() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        state = {"model": model_of(strategy), "step": 0}

        def step() -> None:
            state["step"] += 1 + replica()

        strategy.run(step)
    del strategy
    gc.collect()
    assert state["step"] == 1
