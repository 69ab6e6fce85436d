"""An answer that comes when nobody waits for it any more is not taken for that of the next question.

And the ways in which the system says that a server's host has vanished.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from served_here import THREAD, served_here
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core.errors import DeadlineExceededError
from tfstyle_dist.parameter_server.client import connection
from tfstyle_dist.parameter_server.server.loop import ParameterServer

pytestmark = pytest.mark.timeout(60)
TRANSPORTS = {"shared memory": ("1", "0"), "TCP": ("0", "1"), "ZeroMQ": ("0", "0")}


@pytest.fixture(params=TRANSPORTS)
def here(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Any, ParameterServer]]:
    """A cluster with the server in this process, by each transport."""
    for name, value in zip(("TFSTYLE_SHARED_MEMORY", "TFSTYLE_PS_TCP"), TRANSPORTS[request.param], strict=True):
        monkeypatch.setenv(name, value)
    with served_here(cluster(workers=1, ps=1, start=False, coordinator=False)) as served:
        yield served


def read_once(c: Any) -> tuple[Any, Any]:
    """A variable, and the link to its server, which has answered."""
    with c.strategy.scope():
        v = td.Variable(torch.zeros(10))
    assert v.value().eq(0).all()
    return v, c.strategy.servers.links[0]


def test_of_a_call(here: Any) -> None:
    c, server = here
    _, link = read_once(c)
    link.timeout = timedelta(seconds=0.3)
    with server.lock, pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        link.call({"method": "statistics"})
    link.timeout = timedelta(seconds=20)
    assert c.strategy.servers.call(0, {"method": "fence", "closure": 1 << 30, "attempt": 1}) == {}
    assert c.strategy.servers.call(0, {"method": "statistics"})["variables"] == 1


def test_of_a_request(here: Any) -> None:
    c, server = here
    v, link = read_once(c)
    with c.strategy.scope():
        large = td.Variable(torch.zeros(300_000))
    for variable in (v, large):
        link.timeout = timedelta(seconds=0.3)
        with server.lock, pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
            variable.assign_add(torch.ones(variable.shape))
        link.timeout = timedelta(seconds=20)
        variable.assign_add(torch.ones(variable.shape))
        assert float(variable.value().max()) in (1, 2)  # what was not answered may have been made


def test_a_strategy_that_ends_after_one_says_goodbye(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GOODBYE_MS", 20_000)  # of a busy machine
    c, server = here
    _, link = read_once(c)
    link.timeout = timedelta(seconds=0.3)
    with server.lock, pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        link.call({"method": "statistics"})
    c.strategy.close()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == THREAD])


def test_a_function_whose_server_is_always_late_is_not_run_without_end(cluster: Any, tmp_path: Any) -> None:
    c = cluster(workers=1, ps=1)
    runs = tmp_path / "runs"

    def always_late() -> None:
        with runs.open("a") as file:
            file.write("+")
        td.get_strategy().servers.links[0].lose("did not answer in time", alive=True)
        raise DeadlineExceededError("/job:ps/task:0 did not answer within 0.3 s")

    c.coordinator.schedule(always_late)
    with pytest.raises(DeadlineExceededError, match="did not answer"):
        c.coordinator.join(timeout=20)
    assert runs.read_text() == "++"


@pytest.mark.parametrize("here", ["shared memory"], indirect=True)
def test_of_a_connection_that_is_being_made(here: Any) -> None:
    c, server = here
    v, link = read_once(c)
    link.lose("is tried", alive=True)
    link.reconnect()
    exchange, asked = link._exchange, []

    def when_busy(header: Any, meta: bytes, frames: Any) -> Any:
        asked.append(header.kind)
        if len(asked) != 2:
            return exchange(header, meta, frames)
        with server.lock:  # the transport's question
            link.timeout = timedelta(seconds=0.3)
            return exchange(header, meta, frames)

    link._exchange = when_busy
    with pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        link.call({"method": "statistics"})
    link.timeout, link._exchange = timedelta(seconds=20), exchange
    assert c.strategy.servers.call(0, {"method": "fence", "closure": 1 << 30, "attempt": 1}) == {}
    assert v.value().eq(0).all()


@pytest.mark.parametrize("here", ["TCP"], indirect=True)
@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_a_host_that_cannot_be_reached_for_a_while_is_asked_again(here: Any, number: int) -> None:
    """As TCP says it when what was sent was not acknowledged for too long, or the other end does not answer probes."""
    c, _ = here
    v, link = read_once(c)

    class Vanished:
        def recv(self, most: int) -> bytes:
            raise OSError(number, "the host has vanished")

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    used = link.transport.socket
    real, used._socket = used._socket, Vanished()
    assert v.value().eq(0).all()
