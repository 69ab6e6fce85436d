"""The threads that others wake end while somebody wakes them."""

from __future__ import annotations

import os
import select
import time

import pytest

from tfstyle_dist.coordinator.closure_queue import ClosureQueue
from tfstyle_dist.coordinator.worker_pool import WorkerPool
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.experimental import rpc
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.peer_loop import Wakeup

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def written_to(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes to events come late: the thread has noticed by itself that it is to end. Gives what they were made to."""
    write, found = os.eventfd_write, []

    def late(event: int, value: int) -> None:
        time.sleep(1.3)  # longer than the threads sleep
        found.append(os.readlink(f"/proc/self/fd/{event}"))
        write(event, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    return found


def test_it_wakes_again_once_it_was_cleared_and_not_after_its_end() -> None:
    wakeup = Wakeup()
    for _ in range(2):
        wakeup.set()
        wakeup.set()
        assert select.select([wakeup.file], [], [], 0)[0]
        wakeup.clear()
        assert not select.select([wakeup.file], [], [], 0)[0]
    wakeup.close()
    wakeup.set()  # nobody can write to what is closed


def test_the_coordinators_thread(written_to: list[str]) -> None:
    context = zeromq_sockets.Context(None)
    pool = WorkerPool(context, [], [], {}, ClosureQueue(), {}, {})
    try:
        pool.stop()
        pool.stop()
        pool.wake()
        assert not pool._thread.is_alive()
    finally:
        context.close()
    assert written_to == ["anon_inode:[eventfd]"]


def test_the_thread_of_an_rpc_server(written_to: list[str]) -> None:
    """A descriptor that was closed may be that of another file already when it is written to."""
    server = rpc.Server.create("grpc", f"127.0.0.1:{free_ports(1)[0]}")
    server.start()
    server.stop()
    server.stop()
    server._fail(b"", 0, RuntimeError("a call that ends only now"))
    assert server._thread is not None
    assert not server._thread.is_alive()
    assert written_to == ["anon_inode:[eventfd]"]
