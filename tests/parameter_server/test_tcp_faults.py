"""TCP connections whose ends stop, stay silent, break off or are too many: the server goes on, and values stay whole."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.parameter_server import wire, zmq_link
from tfstyle_dist.parameter_server.client import ServerLink
from tfstyle_dist.parameter_server.service import ParameterServer
from tfstyle_dist.parameter_server.wire import Header, Kind, Op, Operation
from tfstyle_dist.parameter_server.work import NO_WORK

pytestmark = pytest.mark.timeout(60)
LARGE = 16 << 20
"""Elements: more than both ends' socket buffers hold."""


@pytest.fixture
def far(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes clusters whose tensors travel by TCP."""
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    monkeypatch.setenv("TFSTYLE_PS_TCP", "1")

    def make(**options: Any) -> Any:
        return cluster(env={"TFSTYLE_SHARED_MEMORY": "0", "TFSTYLE_PS_TCP": "1"}, workers=1, ps=1, **options)

    return make


@pytest.fixture
def here(far: Callable[..., Any]) -> Iterator[tuple[Any, ParameterServer]]:
    """A cluster with the server in this process."""
    c = far(start=False, coordinator=False)
    context = zmq_link.Context(None)
    server = ParameterServer(context, c.spec["ps"][0], "/job:ps/task:0", 60.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        c.make_coordinator()
        yield c, server
    finally:
        c.strategy.close()
        thread.join(20)
        context.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("tfstyle-ps")]


def place_of(variable: Any) -> int:
    return int(variable._tfstyle_record.shards[0].number)


def add_to(link: ServerLink, number: int, value: torch.Tensor) -> None:
    link.batch(NO_WORK, [Operation(Op.ADD, 0, number, 0, 0, value.nbytes)], [value], None)


def test_many_requests_before_an_answer_is_taken(far: Any) -> None:
    """The answers fill the socket while this end sends: it must take some."""
    c = far()
    with c.strategy.scope():
        v = td.Variable(0.0)
    assert float(v.value()) == 0
    link = c.strategy.servers.links[0]
    known = v._tfstyle_record.versions[0]
    for _ in range(12):  # about 1 MB there, and 1 MB back
        link.batch(NO_WORK, [Operation(Op.PULL, 0, place_of(v), known)] * 30_000, [], None)
    link.finish()
    assert float(v.value()) == 0


def test_a_server_that_stops_while_it_is_sent_a_tensor(far: Any) -> None:
    c = far()
    with c.strategy.scope():
        v = td.Variable(torch.zeros(LARGE))
    assert v.value().eq(0).all()
    link = c.strategy.servers.links[0]
    link._timeout = timedelta(seconds=30)
    c.signal("ps", 0, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):
        add_to(link, place_of(v), torch.ones(LARGE))
        link.finish()
    assert time.monotonic() - begun < 20
    c.signal("ps", 0, signal.SIGCONT)
    assert v.value().eq(0).all()
    v.assign_add(torch.ones(LARGE))
    assert v.value().eq(1).all()


def test_a_tensor_that_was_sent_in_part_is_not_completed_by_the_next(here: Any) -> None:
    c, server = here
    with c.strategy.scope():
        v = td.Variable(torch.zeros(LARGE))
    assert v.value().eq(0).all()
    link = c.strategy.servers.links[0]
    link._timeout = timedelta(seconds=1.2)
    with server.lock, pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        add_to(link, place_of(v), torch.ones(LARGE))
    link._timeout = timedelta(seconds=20)
    v.assign_add(torch.full((LARGE,), 2.0))
    assert v.value().eq(2).all()
