"""TF-style optimizers over central storage of two ranks: each updates a part, the slots are shared; a stopped rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from central_ranks import is_own

import tfstyle_dist as td
from tfstyle_dist.gradients import update_shards
from tfstyle_dist.variables import find_record

pytestmark = pytest.mark.cpu_only("central storage between processes computes on the CPU")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "GradientDescent": lambda: td.train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: td.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adam": lambda: td.train.AdamOptimizer(0.01, epsilon=1e-3),
    "Adagrad": lambda: td.train.AdagradOptimizer(0.1),
    "Adadelta": lambda: td.train.AdadeltaOptimizer(0.5, epsilon=1e-6),
    "RMSProp": lambda: td.train.RMSPropOptimizer(0.01, momentum=0.5, centered=True, epsilon=1e-3),
    "Ftrl": lambda: td.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 40, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def variables(**options: Any) -> list[Any]:
    torch.manual_seed(3)
    return [td.Variable(torch.randn(40, 5).double(), **options), td.Variable(torch.zeros(5, 1, dtype=torch.float64))]


def losses(weights: list[Any], part: slice, step: int) -> torch.Tensor:
    x, y = batch(step)
    return ((x[part] @ weights[0]).tanh() @ weights[1] + weights[0].mean() - y[part]).pow(2).squeeze(1)


def train(strategy: Any, weights: list[Any], optimizer: Any, steps: range) -> None:
    def step(number: int) -> None:
        context = td.get_replica_context()
        assert context is not None
        own = slice(context.replica_id_in_sync_group * 4, context.replica_id_in_sync_group * 4 + 4)
        loss = td.nn.compute_average_loss(losses(weights, own, number), global_batch_size=8)
        optimizer.minimize(loss, var_list=weights if number != 1 else weights[:1])  # not always all of them

    for number in steps:
        strategy.run(step, args=(number,))


def train_plainly(weights: list[Any], optimizer: Any, steps: range) -> None:
    for number in steps:
        loss = losses(weights, slice(0, 8), number).mean()
        optimizer.minimize(loss, var_list=weights if number != 1 else weights[:1])


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.distributed(workers=2, timeout=60, deadline=15)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_rule_agrees_with_one_device_and_its_slots_are_there_once(
    central: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_shards, "MOST", 64)  # several parts of one variable for a rank, as with large ones
    with central.scope():
        ours, optimizer = variables(), OPTIMIZERS[name]()
    plain, plain_optimizer = variables(), OPTIMIZERS[name]()
    train(central, ours, optimizer, range(4))
    train_plainly(plain, plain_optimizer, range(4))
    assert_same(ours, plain)
    assert_same(optimizer.variables(), plain_optimizer.variables())
    record = find_record(ours[0])
    assert record is not None
    assert central.parameter_store.shared_home.written() == [], "no rank has pages of its own"
    slots = [optimizer.get_slot(ours[0], slot) for slot in optimizer.get_slot_names()]
    assert not any(map(is_own, slots))
    for slot in slots:
        slot.fill_(7.0)
        assert is_own(slot), "what a rank writes stays its own until the next step"


@pytest.mark.distributed(workers=2, timeout=60, deadline=15)
def test_a_state_moves_between_plain_and_central(central: Any, shared_tmp_path: Path) -> None:
    plain, plain_optimizer = variables(), OPTIMIZERS["Adam"]()
    train_plainly(plain, plain_optimizer, range(3))
    with central.scope():
        ours, optimizer = variables(), OPTIMIZERS["Adam"]()
        for a, b in zip(ours, plain, strict=True):
            a.assign(b.detach())
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()), ours)
    train(central, ours, optimizer, range(3, 5))
    train_plainly(plain, plain_optimizer, range(3, 5))
    assert_same(ours, plain)
    path = td.train.Checkpoint(weights=ours, optimizer=optimizer).save(str(shared_tmp_path / "checkpoint"))
    train(central, ours, optimizer, range(5, 7))
    td.train.Checkpoint(weights=ours, optimizer=optimizer).restore(path)
    assert_same(optimizer.variables(), plain_optimizer.variables())
    train(central, ours, optimizer, range(5, 7))
    train_plainly(plain, plain_optimizer, range(5, 7))
    assert_same(ours, plain)


@pytest.mark.distributed(workers=2, timeout=60, deadline=15)
def test_a_constraint_is_met_by_the_one_copy(central: Any) -> None:
    clip = lambda value: value * (1.0 / value.norm().clamp(min=1.0))  # noqa: E731
    with central.scope():
        ours, optimizer = variables(constraint=clip), OPTIMIZERS["Momentum"]()
    plain, plain_optimizer = variables(constraint=clip), OPTIMIZERS["Momentum"]()
    train(central, ours, optimizer, range(4))
    train_plainly(plain, plain_optimizer, range(4))
    assert_same(ours, plain)
    assert float(ours[0].detach().norm()) <= 1.0 + 1e-9


@pytest.mark.slow
@pytest.mark.distributed(workers=2, timeout=60, deadline=8)
def test_a_stopped_rank_is_named_and_the_copy_is_whole(rank: int, ranks: Any) -> None:
    strategy = td.experimental.CentralStorageStrategy()
    with strategy.scope():
        model = torch.nn.Linear(40, 1).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()

    for number in range(2):
        strategy.run(step, args=(number,))
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        ranks.stop(1)
        # Rank 0 resumes it after it has given up: that is what this rank finds.
        with pytest.raises((ConnectionError, TimeoutError)):
            strategy.run(step, args=(2,))
    else:
        try:
            with pytest.raises((ConnectionError, TimeoutError), match=r"Worker 1 is missing(.|\n)*stopped \(SIGSTOP\)"):
                strategy.run(step, args=(2,))
        finally:
            strategy.worker.group.abort()
            ranks.resume(1)
    strategy.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]
