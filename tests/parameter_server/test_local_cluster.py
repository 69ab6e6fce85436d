"""A cluster on this machine that one program starts for itself."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.testing.runner import run_script

pytestmark = pytest.mark.timeout(120)


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def train(strategy: td.ParameterServerStrategy) -> float:
    coordinator = td.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: float) -> None:
        optimizer.zero_grad()
        (model(torch.tensor([[x]])) - 3 * x).square().sum().backward()
        optimizer.step()

    for number in range(60):
        coordinator.schedule(step, args=(number % 3 / 2,))
    coordinator.join(timeout=60)
    return float(model.weight.detach())


def test_a_program_trains_with_a_cluster_of_its_own() -> None:
    with td.Server.local_cluster(workers=2, ps=1) as cluster:
        assert {job: len(addresses) for job, addresses in cluster.cluster_spec().as_dict().items()} == {
            "worker": 2,
            "ps": 1,
        }
        pids = cluster.pids
        strategy = td.ParameterServerStrategy(cluster)
        assert train(strategy) > 1.0
        strategy.close()
    assert not any(map(running, pids))
    cluster.close()  # again: nothing to do


def test_one_strategy_after_another() -> None:
    """The tasks end with the block, not with the first strategy; the next one finds them as new."""
    with td.Server.local_cluster(workers=1, ps=1) as cluster:
        pids, weights = cluster.pids, []
        for ended_by in ("strategy", "coordinator", "strategy"):
            strategy = td.ParameterServerStrategy(cluster, max_staleness=0)
            weights.append(train(strategy))
            if ended_by == "coordinator":
                strategy.coordinator.close()
            strategy.close()
        assert len(set(weights)) == 1
        assert all(map(running, pids))
    assert not any(map(running, pids))


def test_without_a_resolver_the_strategy_starts_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with caplog.at_level(logging.WARNING, logger="tfstyle_dist"):
        strategy = td.ParameterServerStrategy()
    assert "starts 2 workers and 1 parameter server on this machine" in caplog.text
    pids = strategy.cluster_resolver.pids
    assert len(pids) == 3
    assert train(strategy) > 1.0
    strategy.close()
    assert not any(map(running, pids))


def test_tasks_of_a_dropped_strategy_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = td.ParameterServerStrategy()
    pids = strategy.cluster_resolver.pids
    del strategy
    gc.collect()
    wait_until(lambda: not any(map(running, pids)))


_FORKS = """
import os, sys, time
import torch
import tfstyle_dist as td
cluster = td.Server.local_cluster(1, 1)
strategy = td.ParameterServerStrategy(cluster)
coordinator = td.coordinator.ClusterCoordinator(strategy)
def batch():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    return [b[0].sum().item() for b in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)]
def fork():
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    return child.pid
batches = coordinator.schedule(batch)
coordinator.join(timeout=60)
child = coordinator.schedule(fork).fetch()
print("pids", *cluster.pids, child)
assert batches.fetch() == [6.0, 22.0]
"""


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "sys.stdout.flush(); os._exit(3)"])
def test_a_worker_forks(tmp_path: Path, end: str) -> None:
    """The child closes its input, as multiprocessing does, while the task waits for the end of that; it ends too."""
    script = tmp_path / "program.py"
    script.write_text(_FORKS + end + "\n")
    done = run_script([str(script)], timeout=90)
    assert done.returncode == 3, done.stderr
    pids = [int(word) for word in done.stdout.split("pids")[1].split()[:3]]
    wait_until(lambda: not any(map(running, pids)))


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import os; sys.stdout.flush(); os._exit(3)"])
def test_tasks_end_with_the_program(tmp_path: Path, end: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "import tfstyle_dist as td\n"
        "cluster = td.Server.local_cluster(1, 1)\n"
        "strategy = td.ParameterServerStrategy(cluster)\n"
        "print('pids', *cluster.pids)\n"
        f"{end}\n"
    )
    done = run_script([str(script)], timeout=60)
    assert done.returncode == 3
    pids = [int(word) for word in done.stdout.split("pids")[1].split()[:2]]
    wait_until(lambda: not any(map(running, pids)))


@pytest.mark.parametrize("given", [{"workers": 0}, {"ps": -1}, {"workers": True}, {"ps": 1.5}])
def test_what_is_no_number_of_tasks(given: dict[str, int]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"at least one task of each kind, got {name}="):
        td.Server.local_cluster(**given)
