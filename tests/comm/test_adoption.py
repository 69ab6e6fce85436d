"""Strategies over process groups that the program has made: theirs are the ranks, the store, the backend, the limit."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it would keep the group after its end: see docs/scaling_out.md

import tfstyle_dist as td
from tfstyle_dist.cluster_resolver import ClusterSpec, SimpleClusterResolver

STRATEGIES = [td.MirroredStrategy, td.MultiWorkerMirroredStrategy]
NO_LAUNCHER: dict[str, str | None] = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
ranks_of_two = pytest.mark.distributed(workers=2, timeout=110, deadline=40)
by_hand = pytest.mark.distributed(workers=2, timeout=110, deadline=40, env=NO_LAUNCHER)
no_limit_said = pytest.mark.distributed(workers=2, timeout=110, env={"TFSTYLE_TIMEOUT_SECONDS": None})


def join(rank: int, size: int, name: str = "-own", backend: str = "gloo", seconds: float = 100) -> None:
    path = os.environ["TFSTYLE_RENDEZVOUS_FILE"] + name
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def all_reduce(value: float = 1.0) -> torch.Tensor:
    replica = td.get_replica_context()
    assert replica is not None
    result: torch.Tensor = replica.all_reduce("SUM", torch.tensor(value))
    return result


def trained(strategy: td.Strategy, steps: int = 3) -> list[torch.Tensor]:
    """The parameters after some steps on 4 examples, whatever the number of replicas."""
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(12.0).view(4, 3) / 10

    def step() -> None:
        replica = td.get_replica_context()
        assert replica is not None
        share = data.chunk(replica.num_replicas_in_sync)[int(replica.replica_id_in_sync_group)]
        optimizer.zero_grad()
        model(share).square().mean().backward()
        optimizer.step()

    for _ in range(steps):
        strategy.run(step)
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone() -> list[torch.Tensor]:
    with td.OneDeviceStrategy("cpu:0") as strategy:
        return trained(strategy)


@ranks_of_two
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_group_of_the_program_is_adopted_and_kept(rank: int, make: Callable[..., Any]) -> None:
    join(rank, 2)
    for _ in range(2):
        with make() as strategy:
            assert strategy.num_replicas_in_sync == 2
            assert strategy.is_chief == (rank == 0)
            torch.testing.assert_close(trained(strategy), alone())
    dist.barrier()  # it is there, and nothing of ours is under way in it


@by_hand
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_group_without_a_launcher(rank: int, make: Callable[..., Any]) -> None:
    join(rank, 2)
    with make() as strategy:
        assert strategy.run(all_reduce) == 2.0
        if make is td.MultiWorkerMirroredStrategy:
            resolver = strategy.cluster_resolver
            assert (resolver.task_type, resolver.task_id) == ("worker", rank)
            assert resolver.cluster_spec().as_dict() == {"worker": ["rank-0", "rank-1"]}


@ranks_of_two
def test_ours_and_the_programs_calls_do_not_meet(rank: int) -> None:
    """Calls of the program are under way in its group while a strategy calls."""
    join(rank, 2)
    with td.MirroredStrategy() as strategy:
        value = torch.full((5,), float(rank + 1))
        work = dist.all_reduce(value, async_op=True)
        assert strategy.run(all_reduce) == 2.0
        work.wait()
        assert value.tolist() == [3.0] * 5


# ---- a part of the workers -------------------------------------------------------------------------------------


@pytest.mark.distributed(workers=3, timeout=110, deadline=40)
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_subgroup(rank: int, make: Callable[..., Any]) -> None:
    """Ranks 0 and 2 train; rank 1 calls nothing at all meanwhile."""
    join(rank, 3)
    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match=r"This process is not a member of process_group. Make the strategy on"):
            make(process_group=pair)
    else:
        for _ in range(2):
            with make(process_group=pair) as strategy:
                assert (strategy.num_replicas_in_sync, strategy.is_chief) == (2, rank == 0)
                torch.testing.assert_close(trained(strategy), alone())
    dist.barrier()


@pytest.mark.distributed(workers=4, timeout=110, deadline=40)
def test_subgroups_that_know_of_different_numbers_of_groups(rank: int) -> None:
    """torch alone would name their groups differently, and each would wait for the other."""
    join(rank, 4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank in (0, 3):
        dist.new_group([0, 3], use_local_synchronization=True)
    with td.MirroredStrategy(process_group=pairs[rank // 2]) as strategy:
        assert strategy.run(all_reduce, args=(float(rank),)) == (1.0 if rank < 2 else 5.0)
        torch.testing.assert_close(trained(strategy), alone())
    dist.barrier()


@pytest.mark.distributed(workers=3, timeout=110, deadline=40)
def test_a_replica_on_two_workers_of_a_subgroup(rank: int) -> None:
    """Groups of ours within the subgroup: its numbers are not those of the default group."""
    join(rank, 3)
    pair = dist.new_group([1, 2])
    if rank > 0:
        with td.MirroredStrategy(process_group=pair, logical_devices_per_replica=2) as strategy:
            assert strategy.num_replicas_in_sync == 1
            assert strategy.run(all_reduce) == 1.0
    dist.barrier()


@ranks_of_two
def test_a_subgroup_of_one(rank: int) -> None:
    join(rank, 2)
    single = dist.new_group([1])
    if rank == 1:
        with td.MirroredStrategy(process_group=single) as strategy:
            assert strategy.num_replicas_in_sync == 1
            assert strategy.run(all_reduce) == 1.0
    dist.barrier()


# ---- backends and limits -----------------------------------------------------------------------------------------


@ranks_of_two
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", "cpu:gloo", None])
def test_backends_of_several_kinds(rank: int, backend: str | None) -> None:
    join(rank, 2, backend=backend)  # type: ignore[arg-type]
    with td.MirroredStrategy() as strategy:
        torch.testing.assert_close(trained(strategy), alone())


@pytest.mark.distributed(workers=2, timeout=110, deadline=40, env={"TFSTYLE_SHARED_MEMORY": "0"})
@pytest.mark.parametrize("named", ["tfstyle_other", "cpu:tfstyle_other"])
def test_a_backend_that_nobody_knows(rank: int, named: str) -> None:
    """One of another package, as far as torch and this package can tell; it carries what the strategy sends."""
    made = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        made.append(size)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    if not hasattr(dist.Backend, "TFSTYLE_OTHER"):
        dist.Backend.register_backend("tfstyle_other", create, devices=["cpu"])
    else:
        dist.Backend._plugins["TFSTYLE_OTHER"] = dist.Backend._plugins["TFSTYLE_OTHER"]._replace(creator_fn=create)
    join(rank, 2, backend=named)
    assert made == [2]
    with td.MirroredStrategy() as strategy:
        assert made == [2, 2]  # the group of ours is one of it, too
        assert dist.get_backend_config(strategy.worker.group.process_group) == "cpu:tfstyle_other"  # type: ignore[attr-defined]
        torch.testing.assert_close(trained(strategy), alone())
        assert strategy.run(all_reduce) == 2.0


@no_limit_said
def test_the_limit_of_a_wait_is_the_groups(rank: int) -> None:
    join(rank, 2, seconds=71)
    with td.MirroredStrategy() as strategy:
        assert strategy.worker.group.timeout == timedelta(seconds=71)
    options = td.experimental.CommunicationOptions(timeout_seconds=55)
    with td.MirroredStrategy(communication_options=options) as strategy:
        assert strategy.worker.group.timeout == timedelta(seconds=55)


@no_limit_said
def test_the_limit_of_a_group_that_a_strategy_made_is_not_handed_on(rank: int) -> None:
    options = td.experimental.CommunicationOptions(timeout_seconds=55)
    with td.MirroredStrategy(communication_options=options), td.MirroredStrategy() as second:
        assert second.worker.group.timeout == timedelta(minutes=5)


# ---- what contradicts --------------------------------------------------------------------------------------------


@ranks_of_two
def test_a_group_of_another_size_is_refused(rank: int) -> None:
    join(0, 1, f"-alone-{rank}")
    for make in STRATEGIES:
        with pytest.raises(ValueError, match=r"initialised with 1 worker\(s\), but WORLD_SIZE=2"):
            make()  # type: ignore[operator]
    with td.MirroredStrategy(process_group=dist.group.WORLD) as strategy:  # what was meant is said
        assert strategy.num_replicas_in_sync == 1


@ranks_of_two
def test_a_group_of_other_numbers_is_refused(rank: int) -> None:
    join(1 - rank, 2)
    with pytest.raises(ValueError, match=rf"with this process as worker {1 - rank} of 2, but RANK={rank}"):
        td.MirroredStrategy()
    with td.MirroredStrategy(process_group=dist.group.WORLD) as strategy:
        assert strategy.is_chief == (rank == 1)
        assert strategy.run(all_reduce) == 2.0


@by_hand
def test_a_cluster_of_another_size_is_refused(rank: int) -> None:
    join(rank, 2)
    spec = ClusterSpec({"worker": ["host0:1", "host1:1", "host2:1"]})
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=rank)
    with pytest.raises(ValueError, match=r"with 2 worker\(s\), but the cluster has 3 training task\(s\)"):
        td.MultiWorkerMirroredStrategy(resolver)
    with pytest.raises(ValueError, match="process_group and cluster_resolver: leave one out"):
        td.MultiWorkerMirroredStrategy(resolver, process_group=dist.group.WORLD)


def test_what_is_no_group_is_refused() -> None:
    for make in STRATEGIES:
        with pytest.raises(TypeError, match=r"process_group must be a group of torch.distributed, got 'gloo'"):
            make(process_group="gloo")  # type: ignore[operator]


# ---- the end -----------------------------------------------------------------------------------------------------


@ranks_of_two
def test_the_program_destroys_its_group_first(rank: int, shared_tmp_path: Path) -> None:
    join(rank, 2)
    strategy = td.MirroredStrategy()
    strategy.run(all_reduce)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"was destroyed|unknown to torch.distributed"):
        td.MirroredStrategy(process_group=strategy.worker.group.process_group)  # type: ignore[attr-defined]
    assert strategy.gather(torch.tensor([float(rank)]), axis=0).tolist() == [0.0, 1.0]  # it holds its connections
    strategy.close()
    gc.collect()
    join(rank, 2, "-second")
    with td.MirroredStrategy() as second:
        assert second.run(all_reduce) == 2.0
