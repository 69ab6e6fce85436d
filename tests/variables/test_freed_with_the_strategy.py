"""What only a strategy keeps of the objects that it has seen is free once the strategy is closed or gone."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from until import wait_until

import tfstyle_dist as td

CENTRAL = td.experimental.CentralStorageStrategy


class Linear(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def see(*_: Any) -> None:
    """A hook."""


def with_a_method_of_its_own() -> Any:
    model = Linear()
    model.method = model.extra_repr
    return model


def with_a_part_that_knows_it() -> Any:
    model = torch.nn.Sequential(Linear(), torch.nn.BatchNorm1d(2))
    model[0].whole = [model]
    return model


def with_a_hook_on_itself() -> Any:
    model = Linear()
    model.register_forward_hook(functools.partial(see, model))
    return model


def with_an_optimizer() -> Any:
    model = Linear()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.optimizer.register_step_post_hook(functools.partial(see, model))
    model.scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)
    return model


def with_a_partial() -> Any:
    model = Linear()
    model.partial = functools.partial(torch.nn.Module.eval, model)
    return model


class Trainer:
    def __init__(self) -> None:
        self.model, self.callbacks = Linear(), [self.on_end]

    def on_end(self) -> None:
        pass

    def __call__(self, x: torch.Tensor) -> Any:
        return self.model(x)


def with_what_a_step_keeps() -> Any:
    class Keeping(Linear):
        def forward(self, x: torch.Tensor) -> Any:
            self.last, self.itself = super().forward(x), self
            return self.last

    return Keeping()


def a_metric() -> Any:
    return pytest.importorskip("torchmetrics").MeanMetric()


MAKERS = [
    with_a_method_of_its_own,
    with_a_part_that_knows_it,
    with_a_hook_on_itself,
    with_an_optimizer,
    with_a_partial,
    Trainer,
    with_what_a_step_keeps,
    a_metric,
]


def used(strategy: Any, make: Callable[[], Any]) -> weakref.ref[Any]:
    with strategy.scope():
        thing = make()

    def step() -> None:
        out = thing(torch.ones(3, 2))
        if out.requires_grad:
            out.sum().backward()
        if hasattr(thing, "optimizer"):
            thing.optimizer.step()

    for _ in range(2):
        strategy.run(step)
    return weakref.ref(thing)


def is_gone(reference: weakref.ref[Any]) -> bool:
    """Also if a replica's thread is still leaving the last run."""
    wait_until(lambda: _is_collected(reference), 10)
    return True


def _is_collected(reference: weakref.ref[Any]) -> bool:
    gc.collect()
    gc.collect()  # what a strategy lets go when it is collected itself
    return reference() is None


@pytest.mark.parametrize("kind", [td.MirroredStrategy, CENTRAL])
@pytest.mark.parametrize("make", MAKERS)
def test_after_close(kind: Any, make: Callable[[], Any]) -> None:
    strategy = kind(["cpu:0", "cpu:1"])
    thing = used(strategy, make)
    strategy.close()
    assert is_gone(thing)


@pytest.mark.parametrize("kind", [td.MirroredStrategy, CENTRAL])
@pytest.mark.parametrize("make", MAKERS)
def test_after_the_last_reference_to_the_strategy(kind: Any, make: Callable[[], Any]) -> None:
    strategy = kind(["cpu:0", "cpu:1"])
    thing = used(strategy, make)
    del strategy
    assert is_gone(thing)


def test_an_optimizer_does_not_keep_its_strategy() -> None:
    strategy: Any = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    strategy.run(lambda: (model(torch.ones(2)).sum().backward(), optimizer.step()))
    reference, before = weakref.ref(strategy), model.weight.detach().clone()
    del strategy
    assert is_gone(reference)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()  # as in plain torch, though another strategy watches optimizers
        torch.testing.assert_close(model.weight.detach(), before - 0.5)
        with pytest.raises(RuntimeError, match="of a strategy that is gone but steps inside the run of <Mirrored"):
            other.run(optimizer.step)


def trained(strategy: Any) -> Any:
    with strategy.scope():
        norm = torch.nn.BatchNorm1d(2, momentum=1.0)

    def step() -> None:
        replica = td.get_replica_context().replica_id_in_sync_group
        norm(torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 10 * replica)

    strategy.run(step)
    return norm


def saved_mean(norm: torch.nn.Module, folder: Path) -> Any:
    path = td.train.Checkpoint(norm=norm).save(str(folder / "saved"))
    plain = torch.nn.BatchNorm1d(2)
    td.train.Checkpoint(norm=plain).restore(path).expect_partial()
    return plain.running_mean


@pytest.mark.parametrize("kind", [td.MirroredStrategy, CENTRAL])
@pytest.mark.parametrize("closes", [True, False])
def test_buffers_are_saved_across_the_replicas_afterwards(kind: Any, closes: bool, tmp_path: Path) -> None:
    strategy = kind(["cpu:0", "cpu:1"])
    norm, other = trained(strategy), trained(strategy)
    other.running_mean.fill_(4.0)  # which no replica has seen
    if closes:
        strategy.close()
    else:
        del strategy
        gc.collect()
    assert norm.running_mean.tolist() == [1.0, 2.0]  # replica 0's, as ever
    assert saved_mean(norm, tmp_path / "a").tolist() == [6.0, 7.0]
    assert saved_mean(other, tmp_path / "b").tolist() == [4.0, 4.0]
    norm.running_mean[0] = 5.0  # written in place: all replicas' now
    assert saved_mean(norm, tmp_path / "c").tolist() == [5.0, 2.0]
    norm.load_state_dict({name: value + 1 for name, value in norm.state_dict().items()})
    assert saved_mean(norm, tmp_path / "d").tolist() == [6.0, 3.0]
    reference = weakref.ref(norm)
    del norm
    assert is_gone(reference)
    assert saved_mean(other, tmp_path / "e").tolist() == [4.0, 4.0]


def test_variables_are_read_when_the_strategy_is_gone() -> None:
    strategy: Any = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        policy = td.VariableSynchronization.ON_READ
        total = td.Variable(0.0, synchronization=policy, aggregation=td.VariableAggregation.SUM)
    strategy.run(lambda: total.assign_add(td.get_replica_context().replica_id_in_sync_group + 1.0))
    del strategy
    gc.collect()
    assert float(total.read_value()) == 3.0


def test_another_strategy_goes_on_with_the_same_objects() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.itself = 0, [self]

    def step() -> int:
        model.calls += td.get_replica_context().replica_id_in_sync_group + 1
        return int(model.calls)

    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as living:
        model = Counting()
        first: Any = td.MirroredStrategy(["cpu:0", "cpu:1"])
        assert living.run(step).values == (1, 2)
        first.run(step)
        assert model.calls == 2
        first.close()
        assert model.calls == 2
        assert living.run(step).values == (3, 4)
        assert living.run(step).values == (4, 6)
