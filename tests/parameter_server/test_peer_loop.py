"""Connections to peers come up, are lost or refused; threads that others wake end while somebody wakes them."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest

from tfstyle_dist.coordinator.closure_queue import ClosureQueue
from tfstyle_dist.coordinator.worker_pool import WorkerPool
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.experimental import rpc
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.key_pair import Keys
from tfstyle_dist.parameter_server.protocol.peer_loop import News, Peer, PeerLoop, Wakeup

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def written_to(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes to pipes come late: the thread has noticed by itself that it is to end. Gives what they were made to."""
    write, found = os.write, []

    def late(handle: int, data: bytes) -> int:
        kind = os.readlink(f"/proc/self/fd/{handle}").partition(":")[0]
        if data == b"\0" and kind == "pipe":
            time.sleep(1.3)  # longer than the threads sleep
            found.append(os.readlink(f"/proc/self/fd/{handle}").partition(":")[0])
        return write(handle, data)

    monkeypatch.setattr(os, "write", late)
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
    assert written_to == ["pipe"]


def test_the_thread_of_an_rpc_server(written_to: list[str]) -> None:
    """A descriptor that was closed may be that of another file already when it is written to."""
    server = rpc.Server.create("grpc", f"127.0.0.1:{free_ports(1)[0]}")
    server.start()
    server.stop()
    server.stop()
    server._fail(b"", 0, RuntimeError("a call that ends only now"))
    assert server._thread is not None
    assert not server._thread.is_alive()
    assert written_to == ["pipe"]


def news_of(peer: Peer, loop: PeerLoop, wanted: News) -> None:
    """Waits for the next change of a connection, which has to be the wanted one."""
    deadline = time.monotonic() + 40
    while (news := peer.news()) is None:
        assert time.monotonic() < deadline
        loop.turn(100)
    assert news is wanted


def test_a_peer_comes_up_is_lost_and_is_called_for_no_more() -> None:
    context, loop, taken = zeromq_sockets.Context(None), PeerLoop(), []
    address = f"127.0.0.1:{free_ports(1)[0]}"
    listening = context.listen(address)
    peer = Peer(context, address, b"t")
    try:
        loop.add_peer(peer, lambda: taken.append(peer.socket.recv_multipart()), lambda: None)
        news_of(peer, loop, News.UP)
        assert peer.up
        peer.socket.send(b"one")
        identity, _ = listening.recv_multipart()
        listening.send_multipart([identity, b"two"])
        while not taken:
            loop.turn(100)
        assert taken == [[b"two"]]
        listening.close(0)
        news_of(peer, loop, News.LOST)
        assert not peer.up
        loop.remove_peer(peer)
        loop.wake()
        loop.turn(10_000)  # nothing but what wakes it is polled now
    finally:
        peer.close()
        loop.close()
        listening.close(0)
        context.close()


def test_a_peer_with_other_keys_refuses(tmp_path: Path) -> None:
    for name in ("one", "other"):
        zeromq_sockets.new_keys(tmp_path / name)
    server, client = (zeromq_sockets.Context(Keys.load(tmp_path / name)) for name in ("one", "other"))
    address, loop = f"127.0.0.1:{free_ports(1)[0]}", PeerLoop()
    listening = server.listen(address)
    peer = Peer(client, address, b"t")
    try:
        news_of(peer, loop, News.REFUSED)
        assert not peer.up
    finally:
        peer.close()
        loop.close()
        listening.close(0)
        client.close()
        server.close()
