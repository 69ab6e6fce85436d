"""A worker that sends what no worker sends: the coordinator drops the link, and its program goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.closure_queue import ClosureQueue
from tfstyle_dist.coordinator.worker_pool import WorkerPool
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import Header, Kind, pack_message

pytestmark = pytest.mark.timeout(60)
NO_MESSAGES = {
    "nothing": [b""],
    "no header": [b"short"],
    "another protocol": [b"tfXX" + bytes(100)],
    "no JSON": [pack_message(Header(Kind.OK, 0, meta_bytes=3), b"abc")],
    "no list": [pack_message(Header(Kind.ERROR, 0, meta_bytes=2), b"[]")],
}


class Odd:
    """A worker that answers its first call by ``reply`` and the others well."""

    def __init__(self, address: str, context: zeromq_sockets.Context, reply: list[bytes] | None) -> None:
        self._socket = context.listen(address)
        self._reply = reply
        self._poller = zeromq_sockets.poller(self._socket)
        self.over = False
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.over:
            if self._poller.poll(100):
                identity, head, *_ = self._socket.recv_multipart()
                header = Header.unpack(head)
                if header.kind is Kind.HANDSHAKE:
                    self._send(identity, [messages.plain(Kind.OK, {"incarnation": "x"})])
                elif header.kind is Kind.RUN:
                    good = messages.result(header.closure, header.attempt, False, messages.parts_of(7))
                    self._send(identity, self._reply or good)
                    self._reply = None
        self._socket.close(0)

    def _send(self, identity: bytes, parts: list[Any]) -> None:
        with contextlib.suppress(zeromq_sockets.ZMQError):
            self._socket.send_multipart([identity, *parts])


@contextlib.contextmanager
def pool_with(reply: list[bytes] | None) -> Iterator[tuple[WorkerPool, ClosureQueue]]:
    context, address = zeromq_sockets.Context(None), f"127.0.0.1:{free_ports(1)[0]}"
    worker, queue = Odd(address, context, reply), ClosureQueue()
    pool = WorkerPool(context, [address], [], {}, queue, {1: [b"function"]}, {}, 1)
    try:
        yield pool, queue
    finally:
        pool.stop()
        worker.over = True
        worker.thread.join(20)
        context.close()


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_a_message_that_is_none(name: str) -> None:
    with pool_with(NO_MESSAGES[name]) as (pool, queue):
        result = queue.put(1, [], None)
        pool.wake()
        assert result.get(timeout=20) == 7  # given to the worker again, over a new link
        queue.wait(Deadline(None), pool.absent)


def test_an_error_that_is_none() -> None:
    with pool_with(messages.result(1, 1, True, messages.parts_of("no exception"))) as (pool, queue):
        result = queue.put(1, [], None)
        pool.wake()
        with pytest.raises(RuntimeError, match="a str came in place of an error"):
            result.get(timeout=20)


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_an_argument_that_cannot_be_sent_again() -> None:
    with pool_with(None) as (pool, queue):
        first = queue.put(1, [], None)
        pool.wake()
        assert first.get(timeout=20) == 7
        first.set_value(Unsendable())  # as a class may do whose objects can be unpickled and no more
        second = queue.put(1, [], None, [first])
        pool.wake()
        with pytest.raises(TypeError, match="cannot be sent"):
            second.get(timeout=20)
        with pytest.raises(TypeError):
            queue.done()
        third = queue.put(1, [], None)
        pool.wake()
        assert third.get(timeout=20) == 7
