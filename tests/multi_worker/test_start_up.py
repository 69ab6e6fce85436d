"""Start-up of TF_CONFIG clusters: it ends within its deadline, with the name of whoever did not come."""

from __future__ import annotations

import json
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from cluster_processes import LAUNCHER_VARIABLES, Tasks, loopback_cluster

import tfstyle_dist as td
from tfstyle_dist.testing.runner import run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import sys
import torch
import tfstyle_dist as td

strategy = td.MultiWorkerMirroredStrategy()
print("met", strategy.num_replicas_in_sync, flush=True)
total = strategy.run(lambda: td.get_replica_context().all_reduce("SUM", torch.ones(2)))
print("sum", total.tolist(), strategy.is_chief, flush=True)
if "wait" in sys.argv:
    import time
    time.sleep(600)
strategy.close()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_workers_that_start_one_after_the_other_meet(program: Path) -> None:
    with Tasks(program, {"chief": ["127.0.0.9:0"], **loopback_cluster(1)}) as tasks:
        tasks.cluster["chief"] = loopback_cluster(1)["worker"]
        tasks.start(0)  # before the chief, which opens the meeting place
        tasks.start(0, job="chief")
        for job, chief in (("worker", False), ("chief", True)):
            code, output = tasks.end(0, job)
            assert code == 0, output
            assert f"sum [2.0, 2.0] {chief}" in output


def test_absent_tasks_are_listed_with_their_addresses(program: Path) -> None:
    cluster = loopback_cluster(3)
    with Tasks(program, cluster, TFSTYLE_START_TIMEOUT_SECONDS="5") as tasks:
        tasks.start(0, 2)
        for index in (0, 2):
            code, output = tasks.end(index)
            assert code == 1
            assert f"DeadlineExceededError: worker 1 ({cluster['worker'][1]}) did not start within" in output, output
            assert f"worker 1 ({cluster['worker'][1]}): ABSENT" in output


def test_the_first_worker_is_absent(program: Path) -> None:
    cluster = loopback_cluster(2)
    with Tasks(program, cluster, TFSTYLE_START_TIMEOUT_SECONDS="3") as tasks:
        tasks.start(1)
        code, output = tasks.end(1)
    assert code == 1
    assert f"did not reach worker 0 ({cluster['worker'][0]})" in output, output
    assert "nobody listens there (connection refused)" in output


def test_a_worker_that_dies_during_start_up_is_noticed_at_once(program: Path) -> None:
    cluster = loopback_cluster(3)
    with Tasks(program, cluster, TFSTYLE_START_TIMEOUT_SECONDS="100") as tasks:
        # A worker that says hello and then stays in the meeting: the third never comes.
        tasks.start(0, 1)
        wait_for_connection(cluster["worker"][0], tasks)
        tasks.send(signal.SIGKILL, 1)
        code, output = tasks.end(0, timeout=30)
    assert code == 1
    assert f"PeerLostError: worker 1 ({cluster['worker'][1]})" in output, output
    assert "died while the workers started" in output


def wait_for_connection(address: str, tasks: Tasks) -> None:
    """Returns when worker 1 has said hello in the store of worker 0."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=60), wait_for_workers=False)
    while not store.check(["tfstyle/1/hello/1"]):
        time.sleep(0.05)


def test_a_task_that_is_started_twice_is_told(program: Path) -> None:
    cluster = loopback_cluster(3)
    with Tasks(program, cluster, TFSTYLE_START_TIMEOUT_SECONDS="60") as tasks:
        tasks.start(0, 1)
        wait_for_connection(cluster["worker"][0], tasks)
        first = tasks.processes["worker", 1]
        tasks.start(1)
        try:
            output, _ = first.communicate(timeout=30)
        finally:
            first.kill()
    assert "Two processes say that they are worker 1" in output, output


def test_different_clusters_are_refused(program: Path) -> None:
    cluster = loopback_cluster(2)
    other = {"worker": [cluster["worker"][0], "127.0.0.77:2222"]}
    with Tasks(program, cluster, TFSTYLE_START_TIMEOUT_SECONDS="30") as tasks:
        tasks.start(0)
        tasks.start(1, cluster=other)
        for index in (0, 1):
            code, output = tasks.end(index)
            assert code == 1
            assert "The workers were told different clusters" in output, output
            assert "127.0.0.77:2222" in output


def test_a_port_in_use_is_named(program: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Tasks(program, {"worker": [f"127.0.0.2:{port}", "127.0.0.3:1"]}) as tasks:
            tasks.start(0)
            code, output = tasks.end(0)
    assert code == 1
    assert f"UnavailableError: Port {port} is in use by pid " in output, output


@pytest.mark.parametrize(
    ("tf_config", "message"),
    [
        ("{'cluster': {}}", "JSONDecodeError: TF_CONFIG is not JSON (Expecting property name"),
        ({"cluster": {"trainer": ["a:1"]}, "task": {"type": "trainer", "index": 0}}, "Disallowed task type"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}, "`task_id` 2 exceeds"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}, "a:1 is given to both"),
        ({"cluster": {"worker": ["a", "b"]}, "task": {"type": "worker", "index": 0}}, "must have the form 'host:port'"),
    ],
)
def test_a_wrong_tf_config_is_explained_at_once(
    tf_config: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CONFIG", tf_config if isinstance(tf_config, str) else json.dumps(tf_config))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        td.MultiWorkerMirroredStrategy()
    assert message.removeprefix("JSONDecodeError: ") in str(caught.value)


def test_nccl_without_a_gpu_is_refused() -> None:
    result = run_script(
        ["-c", "import tfstyle_dist as td; td.experimental.MultiWorkerMirroredStrategy('NCCL')"],
        env={"CUDA_VISIBLE_DEVICES": "", "RANK": None, "WORLD_SIZE": None, "TF_CONFIG": None},
    )
    assert result.returncode == 1
    assert "ValueError: CommunicationImplementation.NCCL was asked for, but the replicas are on cpu" in result.stderr
