"""MultiWorkerMirroredStrategy beyond the recorded programs, on ranks and in one process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.cluster_resolver import ClusterSpec, SimpleClusterResolver, TorchrunClusterResolver
from tfstyle_dist.core import network
from tfstyle_dist.core.errors import PeerLostError
from tfstyle_dist.variables import first_values

ranks_of_two = pytest.mark.distributed(workers=2, timeout=60, deadline=15)


def all_reduce(value: float = 1.0) -> torch.Tensor:
    replica = td.get_replica_context()
    assert replica is not None
    result: torch.Tensor = replica.all_reduce("SUM", torch.tensor(value))
    return result


@ranks_of_two
def test_several_replicas_of_each_worker_train_as_one_device(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        assert strategy.num_replicas_in_sync == 4
        torch.manual_seed(rank)  # the first worker's weights count
        with strategy.scope():
            model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.run(lambda: None)
        plain = torch.nn.Linear(3, 1)
        plain.load_state_dict(model.state_dict())
        data = torch.arange(24.0).view(8, 3)

        def step() -> None:
            replica = td.get_replica_context()
            assert replica is not None
            first = 2 * replica.replica_id_in_sync_group
            optimizer.zero_grad()
            model(data[first : first + 2]).square().mean().backward()
            optimizer.step()

        strategy.run(step)
        plain(data).square().mean().backward()
        expected = [p.detach() - 0.1 * p.grad for p in plain.parameters() if p.grad is not None]
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)


@ranks_of_two
def test_first_values_travel_in_parts(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model that fills half of a GPU would not fit beside its copy."""
    monkeypatch.setattr(first_values, "BYTES_PER_MESSAGE", 100)
    sizes: list[int] = []
    with td.MirroredStrategy() as strategy:
        broadcast = strategy.worker.group.broadcast
        monkeypatch.setattr(
            strategy.worker.group, "broadcast", lambda flat, *more: sizes.append(flat.numel()) or broadcast(flat, *more)
        )
        torch.manual_seed(rank)
        with strategy.scope():
            model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)), torch.nn.Linear(3, 100))
        strategy.run(lambda: None)
        torch.manual_seed(0)
        expected = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)), torch.nn.Linear(3, 100))
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs.cpu())
    assert sizes == [33, 315, 100]  # parts end with the first tensor that fills them


@ranks_of_two
def test_a_resolver_says_who_the_workers_are(rank: int, shared_tmp_path: Path) -> None:
    """TF_CONFIG's form: worker 0's address is the rendezvous, whatever the launcher said."""
    place = shared_tmp_path / "ports"
    if rank == 0:
        place.with_suffix(".new").write_text(json.dumps(network.free_ports(2)))
        place.with_suffix(".new").rename(place)
    while not place.exists():
        time.sleep(0.01)
    ports = json.loads(place.read_text())
    spec = ClusterSpec({"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]})
    mine = SimpleClusterResolver(spec, task_type=["chief", "worker"][rank], task_id=0)
    with td.MultiWorkerMirroredStrategy(mine) as strategy:
        assert strategy.cluster_resolver is mine
        assert strategy.is_chief == (rank == 0)
        assert strategy.run(all_reduce) == 2.0


@ranks_of_two
def test_all_stop_at_the_same_step(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        steps = 0
        while not strategy.should_stop(rank == 1 and steps == 3):
            steps += 1
        assert steps == 3
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.run(strategy.should_stop)


@ranks_of_two
def test_only_the_chief_prints(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        strategy.print("once")
        strategy.run(lambda: strategy.print("once more"))
    assert capsys.readouterr().out.split("\n") == (["once", "once more", ""] if rank == 0 else [""])


@ranks_of_two
def test_workers_must_hold_as_many_replicas(rank: int) -> None:
    with pytest.raises(ValueError, match=r"worker 0: 1 on cpu, worker 1: 2 on cpu"):
        td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"][: rank + 1])


@pytest.mark.slow
@pytest.mark.distributed(workers=2, timeout=60, deadline=10)
def test_an_absent_worker_shows_where_it_is(rank: int, shared_tmp_path: Path) -> None:
    done = shared_tmp_path / "done"
    strategy = td.MultiWorkerMirroredStrategy()
    strategy.run(all_reduce)

    def forgets_the_collective() -> None:
        while not done.exists():
            time.sleep(0.01)

    if rank == 1:
        forgets_the_collective()
    else:
        with pytest.raises((PeerLostError, TimeoutError)) as caught:
            strategy.run(all_reduce)
        done.touch()
        message = str(caught.value)
        assert message.startswith("Worker 1 is missing"), message
        assert "its Python stack: thread MainThread" in message
        assert "in forgets_the_collective" in message
    strategy.worker.group.abort()
    strategy.close()


@ranks_of_two
def test_the_launcher_and_tf_config_must_not_contradict_each_other(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": rank}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=rf"worker {rank} of 3, but RANK={rank} and WORLD_SIZE=2"):
        td.MultiWorkerMirroredStrategy()
    with td.MultiWorkerMirroredStrategy(TorchrunClusterResolver()) as strategy:
        assert strategy.num_replicas_in_sync == 2


def alone(resolver: Any) -> None:
    with td.MultiWorkerMirroredStrategy(resolver) as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.is_chief
        assert strategy.run(all_reduce) == 1.0
        assert not strategy.should_stop()
        assert strategy.should_stop(True)


def test_an_evaluator_and_a_single_worker_are_alone() -> None:
    cluster = {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}
    alone(SimpleClusterResolver(ClusterSpec(cluster), task_type="evaluator", task_id=0))
    alone(SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0))
    alone(None)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="cluster_resolver must be a ClusterResolver, got 'worker'"):
        td.MultiWorkerMirroredStrategy("worker")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NCCL was asked for"):
        td.MultiWorkerMirroredStrategy(
            communication_options=td.experimental.CommunicationOptions(implementation="NCCL")
        )
