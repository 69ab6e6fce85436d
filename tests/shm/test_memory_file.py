"""Memory that processes of a host share: who gets it, and how the others know that a process has ended."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core import unix_sockets
from tfstyle_dist.shm import memory_file
from tfstyle_dist.shm.memory_file import Presence

two_ranks = pytest.mark.distributed(workers=2, timeout=60, deadline=15)


def test_memory_is_this_users_and_is_found_by_its_drawn_name_alone() -> None:
    handle = memory_file.create("tfstyle-test-1", 100)
    try:
        assert stat.S_IMODE(os.fstat(handle).st_mode) == 0o600
        found = memory_file.find(os.getpid(), handle, "tfstyle-test-1", 100)
        os.pwrite(found, b"same", 0)
        os.close(found)
        assert os.pread(handle, 4, 0) == b"same"
        with pytest.raises(PermissionError, match="is not the memory tfstyle-test-2"):
            memory_file.find(os.getpid(), handle, "tfstyle-test-2", 100)
        with pytest.raises(PermissionError, match="smaller than 101 bytes"):
            memory_file.find(os.getpid(), handle, "tfstyle-test-1", 101)
    finally:
        os.close(handle)


@two_ranks
@pytest.mark.parametrize("reachable", [True, False])
def test_ranks_hand_it_out(rank: int, reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reachable and rank == 1:  # as in another network namespace
        monkeypatch.setattr(unix_sockets, "connect", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError()))
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        mine = memory_file.create("tfstyle-test", 64) if rank == 0 else None
        handle = memory_file.hand_out(mine, rank, (0, 1), group.gather_objects, group.timeout, "test")
        assert (handle is not None) == (reachable or rank == 0)
        if handle is not None:
            assert not os.get_inheritable(handle)
            os.pwrite(handle, bytes([7 + rank]), rank)
        group.numbers(0, "written")
        if handle is not None:
            assert os.pread(handle, 2, 0) == (b"\7\10" if reachable else b"\7\0")
            os.close(handle)


@pytest.mark.distributed(workers=3, timeout=60, deadline=15, may_die=(2,))
def test_a_killed_process_is_gone_and_one_that_forked_is_not(rank: int, ranks: Any, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        mine = memory_file.create("tfstyle-test", 64) if rank == 0 else None
        handle = memory_file.hand_out(mine, rank, (0, 1, 2), group.gather_objects, group.timeout, "test")
        assert handle is not None
        presence = Presence(handle, rank)
        child = 0
        if rank == 1:  # a child has the file, not the lock, and its end changes nothing
            child = os.fork()
            if child == 0:
                signal.pause()
            other = os.fork()
            if other == 0:
                os.close(handle)
                os._exit(0)
            os.waitpid(other, 0)
        group.numbers(0, "locked")
        assert not any(presence.is_gone(other) for other in range(3) if other != rank)
        (shared_tmp_path / str(rank)).touch()
        if rank == 2:  # a slow one has not looked yet when this one comes back from the barrier
            wait_until(lambda: len(list(shared_tmp_path.iterdir())) == 3)
            ranks.kill(2)
        wait_until(lambda: presence.is_gone(2))
        if rank == 0:
            assert not presence.is_gone(1)
        else:
            wait_until(lambda: presence.is_gone(0))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        presence.leave()
        strategy.worker.group.abort()


@two_ranks
def test_one_that_leaves_is_gone(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        mine = memory_file.create("tfstyle-test", 64) if rank == 0 else None
        handle = memory_file.hand_out(mine, rank, (0, 1), group.gather_objects, group.timeout, "test")
        assert handle is not None
        presence = Presence(handle, rank)
        group.numbers(0, "locked")
        if rank == 1:
            presence.leave()
        else:
            wait_until(lambda: presence.is_gone(1))
            presence.leave()
        group.numbers(0, "looked")
