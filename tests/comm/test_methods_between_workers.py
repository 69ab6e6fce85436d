"""``AggregationMethod`` between workers: the bits are those of the reference, whichever way the bytes go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.comm.collectives.halving import Messages, tree_all_reduce
from tfstyle_dist.comm.collectives.routes import Conditions, Route, choose, explain
from tfstyle_dist.comm.collectives.topology import Topology
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist_kernels import reference

METHODS: list[tuple[int, Callable[..., torch.Tensor]]] = [
    (td.AggregationMethod.ADD_N, reference.add_n),
    (td.AggregationMethod.TREE, reference.tree),
    (td.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N, reference.accumulate_n),
]


def contributions(count: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that another order of summation has other bits."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) * 10.0 ** (3 * k % 7) for k in range(count)]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("size", [*range(1, 18), 31])
def test_halving_adds_in_the_shape_of_the_tree(size: int) -> None:
    for numel in (0, 1, 5, 1001):
        parts = contributions(size, numel)
        buffers = [p.clone() for p in parts]
        # All are made here: a defaultdict may make two for the same pair when two threads ask at once.
        mail: dict[Any, SimpleQueue[torch.Tensor]] = {pair: SimpleQueue() for pair in product(range(size), repeat=2)}

        def work(place: int, buffers: Any = buffers, mail: Any = mail) -> None:
            def exchange(sends: Messages, receives: Messages) -> None:
                for to, tensor in sends:
                    mail[place, to].put(tensor.clone())
                for source, tensor in receives:
                    tensor.copy_(mail[source, place].get(timeout=20))

            tree_all_reduce(buffers[place], place, size, exchange)

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(work, range(size)))
        for buffer in buffers:
            assert_same_bits(buffer, reference.tree(parts))


def test_topology() -> None:
    two = Topology.of(["a", "a", "b", "b"])
    assert two.hosts == ((0, 1), (2, 3))
    assert two.aligned
    assert two.neighbours(3) == (2, 3)
    assert two.column(2) == (0, 2)
    assert not Topology.of(["a", "b", "a", "b"]).aligned  # ranks are not consecutive
    assert not Topology.of(["a"] * 3 + ["b"] * 3).aligned  # 3 is no branch of a tree
    assert not Topology.of(["a", "a", "b"]).aligned
    assert Topology.of(["a", "b", "c"]).aligned


def test_the_choice_and_what_it_says() -> None:
    default, add_n, tree = td.AggregationMethod.DEFAULT, td.AggregationMethod.ADD_N, td.AggregationMethod.TREE
    assert default == add_n == 0
    one_host = Conditions(4, 1, aligned=True, memory=True, accelerator=False, summable=True)
    sockets = Conditions(4, 1, aligned=True, memory=False, accelerator=False, summable=True)
    two_hosts = Conditions(4, 2, aligned=True, memory=True, accelerator=False, summable=True)
    gpus = Conditions(4, 1, aligned=True, memory=False, accelerator=True, summable=True)
    for method in (default, add_n, tree):
        assert choose(method, 1 << 20, one_host) is Route.MEMORY
    assert choose(default, 1 << 20, sockets) is choose(default, 1 << 20, gpus) is Route.OWN
    assert choose(add_n, 1 << 10, sockets) is choose(tree, 1 << 10, two_hosts) is Route.GATHER
    assert choose(add_n, 64 << 20, sockets) is choose(add_n, 64 << 20, two_hosts) is Route.SLICES
    assert choose(tree, 64 << 20, sockets) is Route.HALVING
    assert choose(tree, 64 << 20, two_hosts) is choose(default, 64 << 20, two_hosts) is Route.HOSTS
    text = explain(default, 64 << 20, two_hosts)
    assert text.startswith("DEFAULT of 67108864 bytes over 4 workers on 2 host(s): HOSTS")
    assert "added as EXPERIMENTAL_TREE; modelled: HOSTS " in text
    assert "added in the library's order" in explain(default, 1 << 20, sockets)


def check_every_level(rank: int, count: int) -> set[str]:
    """Runs sums, reductions and training with each method; returns the routes that were taken."""
    taken = set()
    for method, reference_sum in METHODS:
        ops = td.ReductionToOneDevice(aggregation_method=method)
        for bytes_per_pack in (0, 64):
            options = td.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
            with td.MirroredStrategy(cross_device_ops=ops, communication_options=options) as strategy:
                group: Any = strategy.worker.group
                sizes = (1, 7, 40_000, 700_001, 2_500_000) if bytes_per_pack == 0 else (5,)
                for numel in sizes:
                    parts = contributions(count, numel)
                    mine = parts[rank].clone()
                    group.all_reduce(mine, "test", method)
                    assert_same_bits(mine, reference_sum(parts))
                    taken.add(group.explain(numel, mine.dtype, method).split(": ")[1].split(",")[0])
                for dtype in (torch.float32, torch.bfloat16):
                    parts = [p.to(dtype) for p in contributions(count, 33)]
                    assert_same_bits(strategy.reduce("SUM", parts[rank], axis=None), reference_sum(parts))
                    mean = reference_sum(parts, divisor=count)
                    assert_same_bits(strategy.reduce("MEAN", parts[rank], axis=None), mean)
                    check_training(strategy, parts, mean, reference_sum(parts), method)
    return taken


def check_mismatches(rank: int) -> None:
    """Another method or another size on one rank is an error on all, and the group goes on."""
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        method = td.AggregationMethod.TREE if rank == 1 else td.AggregationMethod.ADD_N
        for numel, used in ((40_000, method), (40_000 + (rank == 1), td.AggregationMethod.TREE)):
            with pytest.raises(CollectiveMismatchError, match="worker 1: test"):
                group.all_reduce(torch.ones(numel), "test", used)
        total = torch.ones(3)
        group.all_reduce(total, "test", td.AggregationMethod.ADD_N)
        assert_same_bits(total, torch.full((3,), float(group.size)))


def check_training(
    strategy: td.Strategy, parts: list[torch.Tensor], mean: torch.Tensor, total: torch.Tensor, method: int
) -> None:
    """The gradient of ``(w * part).sum()`` is the part: by backward, by all_reduce and by apply_gradients."""
    with strategy.scope():
        module = torch.nn.Module()
        module.weights = torch.nn.ParameterList([torch.zeros(11, dtype=parts[0].dtype) for _ in range(3)])
        variable = td.Variable(torch.zeros(33, dtype=parts[0].dtype))
    optimizer = td.train.GradientDescentOptimizer(learning_rate=-1.0)

    def step() -> torch.Tensor:
        context = td.get_replica_context()
        assert context is not None
        part = parts[context.replica_id_in_sync_group]
        sum((w * p).sum() for w, p in zip(module.weights, part.chunk(3), strict=True)).backward()
        optimizer.apply_gradients([(part, variable)], aggregation_method=method)
        summed = context.all_reduce("SUM", part)
        return torch.cat([w.grad for w in module.weights] + [variable.detach().clone(), summed])

    for got in strategy.experimental_local_results(strategy.run(step)):
        assert_same_bits(got, torch.cat([mean, total, total]))


def test_replicas_of_one_process() -> None:
    for method, reference_sum in METHODS:
        ops = td.ReductionToOneDevice(aggregation_method=method)
        for count in (3, 5):
            with td.MirroredStrategy([f"cpu:{k}" for k in range(count)], cross_device_ops=ops) as strategy:
                for dtype in (torch.float32, torch.bfloat16):
                    parts = [p.to(dtype) for p in contributions(count, 33)]
                    mean = reference_sum(parts, divisor=count)
                    check_training(strategy, parts, mean, reference_sum(parts), method)


@pytest.mark.distributed(workers=3, timeout=110)
@pytest.mark.parametrize("shared", ["1", "0"])
def test_three_ranks(rank: int, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared)
    assert check_every_level(rank, 3) == ({"MEMORY"} if shared == "1" else {"GATHER", "SLICES", "HALVING"})
    check_mismatches(rank)


@pytest.mark.distributed(workers=4, timeout=110)
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab"])
def test_four_ranks(rank: int, hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_HOST", hosts[rank])
    routes = {"aaaa": {"MEMORY"}, "aabb": {"GATHER", "SLICES", "HOSTS"}, "abab": {"GATHER", "SLICES", "HALVING"}}
    assert check_every_level(rank, 4) == routes[hosts]
    check_mismatches(rank)
    with td.MirroredStrategy() as strategy:  # DEFAULT: the same on every rank, and again
        part = contributions(4, 700_001)[rank]
        first, second = (strategy.reduce("SUM", part, axis=None) for _ in range(2))
        assert_same_bits(first, second)
        for other in strategy.worker.group.all_gather(first, "compare"):
            assert_same_bits(other, first)
        exact = sum(p.double() for p in contributions(4, 700_001))
        torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.distributed(workers=4, timeout=90)
def test_more_ranks_than_processors(rank: int) -> None:
    """Who waits sleeps, and all come through."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with td.MirroredStrategy() as strategy:
            group: Any = strategy.worker.group
            assert group._memory.sums.barrier.crowded
            for number in range(200):
                value = torch.full((1000,), float(rank + number))
                group.all_reduce(value, "test")
                assert_same_bits(value, torch.full((1000,), 6.0 + 4 * number))
            used = time.thread_time()
            if rank == 3:
                time.sleep(1)
            group.all_reduce(torch.ones(1), "late")
            assert time.thread_time() - used < 0.5
    finally:
        os.sched_setaffinity(0, before)
