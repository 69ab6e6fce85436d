"""Checks with one replica for each of the CPU's virtual XLA devices; run by test_xla.py."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import xthreads

import tfstyle_dist as tfd

_seeding = threading.Lock()  # torch's generator belongs to the process


def build(strategy: tfd.TPUStrategy) -> torch.nn.Module:
    with strategy.scope(), _seeding, strategy.device:
        return parity.make_model()


def training_is_that_of_one_device(strategy: tfd.TPUStrategy, rank: int) -> None:
    for build_optimizer in parity.OPTIMIZERS.values():
        model = build(strategy)
        start = parity.on_cpu(model)
        optimizer = build_optimizer(model)

        def step(x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = parity.loss_of(model, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            return loss.detach()

        batches, losses = parity.make_batches(6), []
        for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
            losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)))
            if number == 2:
                before = strategy.num_compilations
        assert strategy.num_compilations == before, "a step of known shapes was compiled again"
        expected, weights = parity.plain_training(start, build_optimizer, batches)
        parity.assert_same(losses, expected)
        parity.assert_same(parity.on_cpu(model), weights)


def uneven_shares_count_by_their_examples(strategy: tfd.TPUStrategy, rank: int) -> None:
    model = build(strategy)
    start = parity.on_cpu(model)
    optimizer = parity.OPTIMIZERS["sgd"](model)
    strategy.set_gradient_policy(model.parameters(), scale="SUM")
    size = 4 * strategy.num_replicas_in_sync + 2

    def step(x: torch.Tensor, y: torch.Tensor) -> int:
        optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / (size * 3)).backward()
        optimizer.step()
        return len(x)

    batches = parity.make_batches(3, size)
    for batch in strategy.experimental_distribute_dataset(batches):
        assert strategy.run(step, args=batch) == (5 if rank < strategy.num_replicas_in_sync - 1 else size - 5 * rank)
    _, weights = parity.plain_training(start, parity.OPTIMIZERS["sgd"], batches)
    parity.assert_same(parity.on_cpu(model), weights)


def gradients_of_tf_style_optimizers_are_summed(strategy: tfd.TPUStrategy, rank: int) -> None:
    with strategy.scope(), strategy.device:
        variable = tfd.Variable(torch.tensor([1.0, 2.0], device=strategy.device))
    optimizer = tfd.train.GradientDescentOptimizer(0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.minimize(lambda: (variable * x).sum(), var_list=[variable])

    strategy.run(step, args=(torch.full((2,), rank + 1.0, device=strategy.device),))
    total = sum(range(1, strategy.num_replicas_in_sync + 1))
    parity.assert_same(variable.value().cpu(), torch.tensor([1.0, 2.0]) - 0.1 * total)


def accumulated_gradients_are_reduced_once(strategy: tfd.TPUStrategy, rank: int) -> None:
    model = build(strategy)
    start = parity.on_cpu(model)
    optimizer = parity.OPTIMIZERS["sgd"](model)
    (first, second) = parity.make_batches(2)
    shares = [[t[rank :: strategy.num_replicas_in_sync].to(strategy.device) for t in pair] for pair in (first, second)]

    def step(one: Any, two: Any) -> None:
        with strategy.accumulate():
            parity.loss_of(model, *one).backward()
        parity.loss_of(model, *two).backward()
        optimizer.step()

    strategy.run(step, args=tuple(shares))
    plain = parity.make_model()
    plain.load_state_dict(start)
    for pair in (first, second):
        parity.loss_of(plain, *pair).backward()
    parity.OPTIMIZERS["sgd"](plain).step()
    parity.assert_same(parity.on_cpu(model), plain.state_dict())


def contexts_reduce_and_gather(strategy: tfd.TPUStrategy, rank: int) -> None:
    count, device = strategy.num_replicas_in_sync, strategy.device

    def body(x: torch.Tensor, weight: torch.Tensor) -> Any:
        context = tfd.get_replica_context()
        assert context.replica_id_in_sync_group == rank
        total = context.all_reduce("SUM", x)
        merged = context.merge_call(lambda s, v: s.reduce("MEAN", v, axis=None), args=(x,))
        leaf = x.detach().requires_grad_()
        (context.all_reduce("SUM", leaf) * weight).sum().backward()
        return total, merged, leaf.grad, context.all_gather(x, axis=0)

    mine = torch.tensor([float(rank), 1.0], device=device)
    weight = torch.tensor(rank + 1.0, device=device)
    total, merged, grad, gathered = (t.cpu() for t in strategy.run(body, args=(mine, weight)))
    ranks = list(range(count))
    parity.assert_same(total, torch.tensor([float(sum(ranks)), float(count)]))
    parity.assert_same(merged, torch.tensor([sum(ranks) / count, 1.0]))
    parity.assert_same(grad, torch.full((2,), float(sum(r + 1 for r in ranks))))
    parity.assert_same(gathered, torch.tensor([v for r in ranks for v in (float(r), 1.0)]))
    uneven = strategy.gather(torch.full((rank + 1,), float(rank), device=device), axis=0).cpu()
    parity.assert_same(uneven, torch.tensor([float(r) for r in ranks for _ in range(r + 1)]))


def variables_combine(strategy: tfd.TPUStrategy, rank: int) -> None:
    count = strategy.num_replicas_in_sync
    for aggregation, expected in (("SUM", sum(range(count))), ("MEAN", sum(range(count)) / count)):
        for synchronization in ("ON_WRITE", "ON_READ"):
            with strategy.scope():
                variable = tfd.Variable(
                    0.0,
                    synchronization=tfd.VariableSynchronization[synchronization],
                    aggregation=tfd.VariableAggregation[aggregation],
                )
            value = torch.tensor(float(rank), device=strategy.device)
            strategy.run(lambda x, v=variable: v.assign(x), args=(value,))
            parity.assert_same(float(variable.value()), float(expected))


def a_group_does_all_operations(strategy: tfd.TPUStrategy, rank: int) -> None:
    group, count = strategy.worker.group, strategy.num_replicas_in_sync
    for device in (torch.device("cpu"), strategy.device):
        buffer = torch.arange(2.0 * count).to(device) + rank
        group.all_reduce(buffer, "sum")
        parity.assert_same(buffer.cpu(), torch.arange(2.0 * count) * count + sum(range(count)))
        rows = group.all_gather(torch.tensor([rank, 7]).to(device), "gather")
        assert [row.tolist() for row in rows] == [[r, 7] for r in range(count)]
        # What the other workers hold may be anything, not a number included.
        buffer = torch.full((3,), float(rank) if rank == 1 else float("nan")).to(device)
        group.broadcast(buffer, 1, "broadcast")
        assert buffer.tolist() == [1.0, 1.0, 1.0]
    for turn in range(5):
        values = [{"rank": r, "text": "x" * (r * 300 + turn)} for r in range(count)]
        assert group.gather_objects(values[rank], "objects") == values


def different_calls_raise(strategy: tfd.TPUStrategy, rank: int) -> None:
    with pytest.raises(RuntimeError, match="worker 1: test shape 1"):
        strategy.worker.group.agree(f"shape {rank}", "test")


def the_quickstart_agrees_with_one_device(strategy: tfd.TPUStrategy, rank: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    with _seeding:
        import quickstart
    assert quickstart.train(strategy, epochs=15, batch_size=48) == 0


CHECKS: list[Callable[[tfd.TPUStrategy, int], None]] = [
    training_is_that_of_one_device,
    uneven_shares_count_by_their_examples,
    gradients_of_tf_style_optimizers_are_summed,
    accumulated_gradients_are_reduced_once,
    contexts_reduce_and_gather,
    variables_combine,
    a_group_does_all_operations,
    different_calls_raise,
]


def main() -> None:
    checks = [the_quickstart_agrees_with_one_device] if "quickstart" in sys.argv else CHECKS

    def on_replica(rank: int) -> None:
        with tfd.TPUStrategy() as strategy:
            assert not strategy.use_spmd
            assert strategy.num_replicas_in_sync == xthreads.N
            for check in checks:
                try:
                    check(strategy, rank)
                except BaseException:  # the other threads would wait for ever
                    print(f"FAILED {check.__name__} on replica {rank}\n{traceback.format_exc()}", flush=True)
                    sys.stdout.flush()
                    __import__("os")._exit(1)
                strategy.worker.group.gather_objects(None, "end of check")
                if rank == 0:
                    print(f"ok {check.__name__}", flush=True)

    xthreads.run(on_replica)
    print("done", flush=True)


if __name__ == "__main__":
    main()
