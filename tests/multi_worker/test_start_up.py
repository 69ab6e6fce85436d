"""Start-up of TF_CONFIG clusters: it ends within its deadline, with the name of whoever did not come."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # the first strategy would import it, for seconds, while others wait
from agreement import said_by_first
from cluster_processes import LAUNCHER_VARIABLES, loopback_cluster

import tfstyle_dist as td
from tfstyle_dist.comm.rendezvous.rendezvous import Rendezvous
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError, UnavailableError
from tfstyle_dist.core.logging import _said

pytestmark = pytest.mark.timeout(120)
Cluster = dict[str, list[str]]
Start = Callable[..., td.MultiWorkerMirroredStrategy]


def tasks(count: int, start_timeout: float, **options: Any) -> pytest.MarkDecorator:
    """Ranks that play tasks of a cluster."""
    env = {"TFSTYLE_START_TIMEOUT_SECONDS": str(start_timeout), "CUDA_VISIBLE_DEVICES": ""}
    return pytest.mark.distributed(workers=count, timeout=60, env=env, **options)


@pytest.fixture
def cluster(rank: int, shared_tmp_path: Path) -> Cluster:
    """Three workers at 127.0.0.2 to 127.0.0.4, the same on all ranks."""
    found: Cluster = said_by_first(rank, shared_tmp_path / "cluster", lambda: loopback_cluster(3))
    return found


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Makes this rank a task of a cluster, and the strategy from its TF_CONFIG."""

    def as_task(cluster: Cluster, index: int, job: str = "worker") -> td.MultiWorkerMirroredStrategy:
        for name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
        return td.MultiWorkerMirroredStrategy()

    return as_task


def when_worker_1_has_sent_its_handshake(address: str, action: Callable[[], None]) -> None:
    """Looks into the store of worker 0, in a thread: the task itself waits for the others."""

    def wait() -> None:
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=60), wait_for_workers=False)
        while not store.check(["tfstyle/1/handshake/1"]):
            time.sleep(0.05)
        action()

    threading.Thread(target=wait, daemon=True).start()


@tasks(2, 30)
def test_workers_that_start_one_after_the_other_meet(
    rank: int, cluster: Cluster, start: Start, shared_tmp_path: Path
) -> None:
    chief, worker, _ = cluster["worker"]
    if rank == 0:
        (shared_tmp_path / "begins").touch()  # before the chief, which opens the store
    else:
        while not (shared_tmp_path / "begins").exists():
            time.sleep(0.01)
        time.sleep(0.5)
    with start({"chief": [chief], "worker": [worker]}, 0, ["worker", "chief"][rank]) as strategy:
        total = strategy.run(lambda: td.get_replica_context().all_reduce("SUM", torch.ones(2)))
        assert total.tolist() == [2.0, 2.0]
        assert strategy.is_chief == (rank == 1)


@tasks(2, 8)
def test_absent_tasks_are_listed_with_their_addresses(rank: int, cluster: Cluster, start: Start) -> None:
    with pytest.raises(DeadlineExceededError) as caught:
        start(cluster, [0, 2][rank])
    message, absent = str(caught.value), f"worker 1 ({cluster['worker'][1]})"
    assert message.startswith(f"{absent} did not start within"), message
    assert f"{absent}: ABSENT" in message, message


def give_up_when(condition: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of this rank is up at an event of the test."""

    def check_deadline(rendezvous: Rendezvous) -> None:
        if condition():
            rendezvous._list_absent()

    monkeypatch.setattr(Rendezvous, "_check_deadline", check_deadline)


@tasks(2, 50)
def test_the_verdict_of_worker_0_reaches_a_worker_that_looks_late(
    rank: int, cluster: Cluster, start: Start, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent its handshake, and does not look while worker 0 gives up."""
    here, verdict = shared_tmp_path / "here", shared_tmp_path / "verdict"
    leave_word, beat = Rendezvous._leave_word, Rendezvous._beat

    def leave_word_and_tell(rendezvous: Rendezvous, error: Exception) -> None:
        verdict.touch()
        leave_word(rendezvous, error)

    def beat_and_look_away(rendezvous: Rendezvous) -> None:
        beat(rendezvous)
        here.touch()
        while not verdict.exists():
            time.sleep(0.01)
        time.sleep(1)

    if rank == 0:
        give_up_when(here.exists, monkeypatch)
        monkeypatch.setattr(Rendezvous, "_leave_word", leave_word_and_tell)
    else:
        monkeypatch.setattr(Rendezvous, "_beat", beat_and_look_away)
    with pytest.raises(DeadlineExceededError, match=r"did not start within 50 s(.|\n)*waited for by worker 0"):
        start(cluster, [0, 2][rank])


@tasks(2, 50)
def test_worker_0_does_not_wait_for_ever_until_a_stopped_worker_has_read_its_verdict(
    rank: int, cluster: Cluster, start: Start, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path(f"/proc/{ranks.pids[1]}/stat")
    if rank == 0:
        give_up_when(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", monkeypatch)
    else:
        when_worker_1_has_sent_its_handshake(cluster["worker"][0], lambda: ranks.stop(1))
    try:
        with pytest.raises((DeadlineExceededError, PeerLostError)) as caught:  # the resumed one: worker 0 is gone
            start(cluster, rank)
    finally:
        if rank == 0:
            ranks.resume(1)
    if rank == 0:
        assert "stopped (SIGSTOP)" in str(caught.value)


@tasks(1, 2)
def test_the_first_worker_is_absent(cluster: Cluster, start: Start) -> None:
    with pytest.raises(DeadlineExceededError, match=r"nobody listens there \(connection refused\)") as caught:
        start(cluster, 1)
    assert f"did not reach worker 0 ({cluster['worker'][0]})" in str(caught.value)


@tasks(2, 50, may_die=(1,))
def test_a_worker_that_dies_during_start_up_is_noticed_at_once(
    rank: int, cluster: Cluster, start: Start, ranks: Any
) -> None:
    """It sends its handshake and then stays in the rendezvous: the third never comes."""
    if rank == 1:
        when_worker_1_has_sent_its_handshake(cluster["worker"][0], lambda: ranks.kill(1))
    with pytest.raises(PeerLostError, match="died while the workers started") as caught:
        start(cluster, rank)
    assert str(caught.value).startswith(f"worker 1 ({cluster['worker'][1]})")


@tasks(3, 50, may_die=(0, 2))
def test_a_task_that_is_started_twice_is_told(
    rank: int, cluster: Cluster, start: Start, ranks: Any, shared_tmp_path: Path
) -> None:
    if rank == 0:
        when_worker_1_has_sent_its_handshake(cluster["worker"][0], (shared_tmp_path / "hello").touch)
    while rank == 2 and not (shared_tmp_path / "hello").exists():
        time.sleep(0.02)
    with pytest.raises(ValueError, match="Two processes say that they are worker 1"):
        start(cluster, min(rank, 1))
    assert rank == 1  # the others wait on
    ranks.kill(0)
    ranks.kill(2)


@tasks(2, 30)
def test_different_clusters_are_refused(rank: int, cluster: Cluster, start: Start) -> None:
    others = ["127.0.0.77:2222", cluster["worker"][1]]
    with pytest.raises(ValueError, match="The workers were told different clusters") as caught:
        start({"worker": [cluster["worker"][0], others[1 - rank]]}, rank)
    assert "127.0.0.77:2222" in str(caught.value)


@tasks(1, 5)
def test_a_port_in_use_is_named(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"^Port {port} is in use by pid "):
            start({"worker": [f"127.0.0.2:{port}", "127.0.0.3:1"]}, 0)


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


def test_a_task_without_a_cluster_is_said_to_be_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow trains a job of one worker in each process, and says nothing."""
    _said.discard("TF_CONFIG without a cluster")
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for key, warned in (("cluster", 0), ("clsuter", 1)):
        config = {key: {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with td.MultiWorkerMirroredStrategy() as strategy:
            assert strategy.num_replicas_in_sync == 1
        assert caplog.text.count("only the keys ['clsuter', 'task'], so this process trains alone") == warned


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError, match=r"CommunicationImplementation\.NCCL was asked for, but the replicas are on cpu"
    ):
        td.experimental.MultiWorkerMirroredStrategy("NCCL")
