"""TF-style optimizers in an elastic job of one worker: what they compute, what is put back, and what is refused."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist import train
from tfstyle_dist.elastic.membership.membership import MembershipChanged
from tfstyle_dist.elastic.steps.votes import settings_of

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[torch.nn.Module], train.TFOptimizer]] = {
    "SGD": lambda model: train.GradientDescentOptimizer(0.1),
    "momentum": lambda model: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adam": lambda model: train.AdamOptimizer(0.1),
    "Adagrad": lambda model: train.AdagradOptimizer(0.1),
    "Adadelta": lambda model: train.AdadeltaOptimizer(1.0),
    "RMSProp": lambda model: train.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
    "Ftrl": lambda model: train.FtrlOptimizer(0.1),
    "wrapped": lambda model: train.Optimizer(torch.optim.AdamW(model.parameters(), lr=0.1)),
}


@pytest.fixture
def strategy() -> Iterator[Any]:
    torch.manual_seed(5)
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=4, check_every=1)) as made:
        yield made


def _model(strategy: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with strategy.scope():
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))


def _step(model: torch.nn.Module, optimizer: train.TFOptimizer, global_step: Any = None) -> Callable[..., None]:
    def step(x: torch.Tensor) -> None:
        optimizer.minimize(model(x).square().sum() / 32, global_step)

    return step


def _batches(strategy: Any, count: int = 3) -> list[Any]:
    torch.manual_seed(1)
    return list(strategy.experimental_distribute_dataset([torch.randn(8, 6) for _ in range(count)]))


def _tensors(model: torch.nn.Module, optimizer: train.TFOptimizer) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in [*model.parameters(), *optimizer.variables()]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_computes_what_one_process_with_as_many_replicas_computes(strategy: Any, kind: str) -> None:
    found = []
    with tfd.MirroredStrategy([f"cpu:{r}" for r in range(4)]) as mirrored:
        for one in (strategy, mirrored):
            model = _model(one)
            optimizer = OPTIMIZERS[kind](model)
            for batch in _batches(one):
                one.run(_step(model, optimizer), args=(batch,))
            found.append(_tensors(model, optimizer))
    assert len(found[0]) > 4 or kind == "SGD"
    assert all(map(torch.equal, *found))


def _lose_once(strategy: Any, monkeypatch: pytest.MonkeyPatch, check: Callable[[], None]) -> None:
    """The next step is thrown away when all of it was computed, as if a worker had been lost before the vote."""
    job, membership = strategy._elastic_steps.job, strategy.worker.membership
    commit, refresh = membership.commit, job.refresh

    def lost(packet: Any) -> Any:
        monkeypatch.setattr(membership, "commit", commit)
        raise MembershipChanged

    def refreshed() -> None:
        refresh()
        check()

    monkeypatch.setattr(membership, "commit", lost)
    monkeypatch.setattr(job, "refresh", refreshed)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_is_done_again_leaves_no_trace(
    strategy: Any, monkeypatch: pytest.MonkeyPatch, kind: str, steps_before: int
) -> None:
    """Also the first one, which makes the slots."""
    found = []
    for disturbed in (False, True):
        model = _model(strategy)
        optimizer = OPTIMIZERS[kind](model)
        with strategy.scope():
            count = tfd.Variable(0)
        step, before = _step(model, optimizer, count), []
        for number, batch in enumerate(_batches(strategy)):
            if disturbed and number == steps_before:
                before += _tensors(model, optimizer)

                def check(was: Any = before, model: Any = model, optimizer: Any = optimizer) -> None:
                    now = _tensors(model, optimizer)
                    assert len(now) == len(was)
                    assert all(map(torch.equal, now, was))

                _lose_once(strategy, monkeypatch, check)
            strategy.run(step, args=(batch,))
        found.append([*_tensors(model, optimizer), torch.tensor(int(count))])
    assert strategy._elastic_steps.job.retried == 1
    assert all(map(torch.equal, *found))
    assert int(found[1][-1]) == 3


def test_an_optimizer_that_is_found_in_the_step_is_put_back(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step function names it nowhere one could look: in slots of a class of a library, say."""
    model, found = _model(strategy), []
    hidden = types.ModuleType("hidden_from_elastic")
    hidden.optimizer = train.MomentumOptimizer(0.1, 0.9)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hidden_from_elastic", hidden)

    def step(x: torch.Tensor) -> None:
        importlib.import_module("hidden_from_elastic").optimizer.minimize(model(x).square().sum() / 32)

    strategy.run(lambda: None)
    assert strategy.parameter_store.contents.common.living() == []
    _lose_once(
        strategy, monkeypatch, lambda: found.append(len(sys.modules["hidden_from_elastic"].optimizer.variables()))
    )
    strategy.run(step, args=(_batches(strategy)[0],))
    assert found == [0]
    assert len(hidden.optimizer.variables()) == 4


@pytest.mark.parametrize("when", ["before", "in the step"])
def test_a_variable_that_is_gone_leaves_nothing_behind(
    strategy: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its number may be that of an object, whose attributes a step that is done again puts back."""
    with strategy.scope():
        counts = [tfd.Variable(0) for _ in range(4)]
        other = [torch.nn.BatchNorm1d(6)]
    model, optimizer, done = _model(strategy), train.AdamOptimizer(0.1), []
    step = _step(model, optimizer)

    def count(x: torch.Tensor) -> None:
        model(other[0](x))
        for one in counts:
            one.assign_add(1)

    strategy.run(count, args=(_batches(strategy)[0],))
    objects = {content.number for _, content in strategy.parameter_store.contents.objects()}
    assert {one._tfstyle_record.number for one in counts} <= objects
    strategy.run(step, args=(_batches(strategy)[0],))
    if when == "before":
        counts.clear()

    def last(x: torch.Tensor) -> None:
        counts.clear()  # as the garbage collector may
        other.clear()
        step(x)

    _lose_once(strategy, monkeypatch, lambda: done.append(True))
    strategy.run(last, args=(_batches(strategy)[1],))
    assert done


def test_own_gradients_are_applied_if_they_are_equal(strategy: Any) -> None:
    model, optimizer = _model(strategy), train.AdamOptimizer(0.1)
    whole, same = _model(strategy), train.AdamOptimizer(0.1)

    def step(x: torch.Tensor) -> None:
        pairs = optimizer.compute_gradients(model(x).square().sum() / 32)
        grads = tfd.get_replica_context().all_reduce("SUM", [grad for grad, _ in pairs])
        applied = list(zip(grads, [variable for _, variable in pairs], strict=True))
        optimizer.apply_gradients(applied, skip_gradients_aggregation=True)
        same.minimize(whole(x).square().sum() / 32)

    for batch in _batches(strategy):
        strategy.run(step, args=(batch,))
    assert all(map(torch.equal, _tensors(model, optimizer), _tensors(whole, same)))


def test_own_gradients_that_differ_are_refused(strategy: Any) -> None:
    model, optimizer = _model(strategy), train.AdamOptimizer(0.1)

    def step(x: torch.Tensor) -> None:
        pairs = optimizer.compute_gradients(model(x).square().sum())
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    before = _tensors(model, optimizer)
    with pytest.raises(NotImplementedError, match=r"different gradients of '0.weight'.*all_reduce\('SUM', gradients\)"):
        strategy.run(step, args=(_batches(strategy)[0],))
    assert all(map(torch.equal, _tensors(model, optimizer), before))


def test_a_variable_that_nobody_else_knows_is_refused(strategy: Any) -> None:
    optimizer, strange = train.AdamOptimizer(0.1), tfd.Variable(1.0)

    def step() -> None:
        optimizer.apply_gradients([(torch.ones(()), strange)])

    with pytest.raises(ValueError, match=r"Adam.apply_gradients.*Create it in strategy.scope\(\)"):
        strategy.run(step)


def test_flipped_bits_in_slots_are_found_and_named(strategy: Any) -> None:
    model, optimizer = _model(strategy), train.AdamOptimizer(0.1)
    strategy.run(_step(model, optimizer), args=(_batches(strategy)[0],))
    names = [name for _, name, _ in strategy._elastic_steps.job.audit._tensors(2)]
    assert "AdamOptimizer v of 2.weight" in names
    assert len(names) == 4 + 2 * 4
    keys = [key for key, *_ in strategy._elastic_steps.job.audit._tensors(2)]
    assert len(set(keys)) == len(keys)


def test_settings_are_compared(strategy: Any) -> None:
    model, optimizer = _model(strategy), train.AdamOptimizer(0.1, beta2=0.5)
    strategy.run(_step(model, optimizer), args=(_batches(strategy)[0],))
    (groups,) = settings_of(strategy.parameter_store.contents).values()
    (told,) = groups
    assert (told["learning_rate"], told["beta2"], told["_steps"]) == (0.1, 0.5, 1)


def test_joint_work_draws_the_same_numbers_whoever_holds_the_first_replica(strategy: Any) -> None:
    def step() -> torch.Tensor:
        drawn = tfd.get_replica_context().merge_call(lambda strategy: torch.rand(3))
        return torch.cat([drawn, torch.rand(1)])

    job = strategy._elastic_steps.job
    one = strategy.run(step).values
    job._streams.step, job._streams.held = 7, (2, 3)
    job._streams.begin_step()
    with job._streams.joint_work():
        there = torch.rand(3)
    job._streams.end_step()
    job._streams.held = (0, 1, 2, 3)
    job._streams.step = 7
    job._streams.begin_step()
    with job._streams.joint_work():
        here = torch.rand(3)
    job._streams.end_step()
    assert torch.equal(there, here)
    assert len({tuple(drawn[:3].tolist()) for drawn in one}) == 1
    assert len({float(drawn[3]) for drawn in one}) == 4
