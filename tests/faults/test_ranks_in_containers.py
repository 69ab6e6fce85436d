"""Ranks in containers: each is process 1 of a pid namespace of its own; host name and all else are shared."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import CONTAINER, needs_containers

from tfstyle_dist.comm.peers.peer import this_peer
from tfstyle_dist.core import launch_env, network
from tfstyle_dist.shm.namespaces import pid_namespace

pytestmark = [pytest.mark.timeout(120), needs_containers]
PROGRAM = Path(__file__).with_name("rank_in_container.py")


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Starts two ranks that meet at a port."""
    made: list[subprocess.Popen[str]] = []

    def start(what: str, seconds: int) -> list[subprocess.Popen[str]]:
        (port,) = network.free_ports(1)
        kept = {k: v for k, v in os.environ.items() if k not in (*launch_env.LAUNCHER_VARIABLES, "TF_CONFIG")}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TFSTYLE_TIMEOUT_SECONDS": str(seconds)}
        for rank in range(2):
            made.append(
                subprocess.Popen(
                    [*CONTAINER, sys.executable, str(PROGRAM), what],
                    env={**kept, "RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return made

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=20)


def lines_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"it ended without {text!r}:\n{read}")


def test_a_process_of_another_namespace_is_never_dead() -> None:
    me = this_peer(0)
    assert me.visible()
    assert me.state() == "running"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert dataclasses.replace(me, pid=gone.pid).state() == "dead"
    for pids in ("pid:[1]", ""):
        other = dataclasses.replace(me, pid=gone.pid, pids=pids)
        assert not other.visible()
        assert "in another container of this host" in other.state()
    assert "on host elsewhere, not visible" in dataclasses.replace(me, host="elsewhere").state()


def test_a_namespace_is_told_only_where_proc_shows_it() -> None:
    show = [sys.executable, "-c", "from tfstyle_dist.shm.namespaces import pid_namespace; print(pid_namespace())"]
    shown = [
        subprocess.run([*prefix, *show], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        for prefix in ([], CONTAINER, ["unshare", "--pid", "--fork", "--kill-child"])
    ]
    assert shown[0] == pid_namespace() != ""
    assert shown[1] not in ("", shown[0])
    assert shown[2] == ""  # /proc is that of the host: its numbers mean other processes


def test_they_train_and_end(ranks: Any) -> None:
    for process in ranks("ends", 60):
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 0, output
        assert "started 1 True" in output


def test_a_killed_one_is_noticed_at_once(ranks: Any) -> None:
    first, second = ranks("goes on", 100)
    for process in (first, second):
        lines_until(process, "summed")
    (inner,) = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    os.kill(int(inner), signal.SIGKILL)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 3, output
    assert "PeerLostError Worker 1 is missing" in output
    assert "MISSING, in another container of this host" in output
    assert "worker 1 of this host has left" in output
    assert "Python stack" not in output


@pytest.mark.slow
def test_one_that_lives_is_not_called_dead_and_shows_its_own_stack(ranks: Any) -> None:
    first, second = ranks("holds", 8)
    output, _ = first.communicate(timeout=100)
    assert first.returncode == 3, output
    assert "MISSING, in another container of this host" in output
    assert "held_up_here" in output, output
    assert second.poll() is None
