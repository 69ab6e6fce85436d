"""A link breaks while the server lives: nothing is lost, nothing is made twice, and what may be lost is said."""

from __future__ import annotations

import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.parameter_server.client import connection
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation
from tfstyle_dist.parameter_server.protocol.work import NO_WORK, Work

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("shared", ["1", "0"])
def test_functions_run_again_when_a_server_was_out_of_reach(cluster: Any, shared: str) -> None:
    c = cluster(workers=2, ps=1, env={"TFSTYLE_SHARED_MEMORY": shared})
    with c.strategy.scope():
        count, large = td.Variable(0, dtype=torch.int64), td.Variable(torch.zeros(200_000))

    def add() -> float:
        time.sleep(0.005)
        count.assign_add(1)
        value = large.value()
        large.assign_add(torch.ones(200_000))
        return float(value.max() - value.min())

    def stop() -> None:
        time.sleep(0.2)
        c.signal("ps", 0, signal.SIGSTOP)  # no answer, and no heartbeat, for longer than links wait
        time.sleep(7)
        c.signal("ps", 0, signal.SIGCONT)

    results = [c.coordinator.schedule(add) for _ in range(200)]
    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        c.coordinator.join(timeout=40)
    finally:
        stopper.join()
    assert int(count.value()) == 200
    assert large.value().eq(200).all()
    assert all(r.fetch() == 0 for r in results)


def look_until_it_is_noticed(link: ServerLink) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        link.check()
        time.sleep(0.01)


def test_writes_without_an_answer_are_said(cluster: Any) -> None:
    """Gathered writes of a server that dies must not vanish, even if the function that made them does not look."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(10))
    v.assign_add(torch.ones(10))
    link: ServerLink = c.strategy.servers.links[0]
    number = v._tfstyle_record.shards[0].number
    link.post(Work(1 << 30, 1, 0), [Operation(Op.ADD, 0, number, 0, 0, 40)], [torch.ones(10)])
    c.kill("ps", 0)
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):  # somebody notices, e.g. a read
        look_until_it_is_noticed(link)
    with pytest.raises(UnavailableError, match="1 requests with writes had not been answered"):
        link.finish()


def test_what_was_gathered_before_a_first_connection_that_breaks_is_sent(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(10))
    context = zeromq_sockets.Context(None)
    handshake = {"role": "worker", "session": c.strategy.session, "task": "worker 5"}
    link = ServerLink(context, c.spec["ps"][0], "server", handshake, timedelta(seconds=20))
    exchange, broken = link._exchange, []

    def breaks_first(*message: Any) -> Any:
        if not broken:
            broken.append(message)
            raise link.gone()
        return exchange(*message)

    monkeypatch.setattr(link, "_exchange", breaks_first)
    operation = Operation(Op.ADD, 0, v._tfstyle_record.shards[0].number, 0, 0, 40)
    try:
        link.post(NO_WORK, [operation], [torch.ones(10)])
        link.call({"method": "statistics"})
        link.finish()
    finally:
        link.close(goodbye=False)
        context.close()
    assert broken
    assert v.value().eq(1).all()


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_server_that_looked_alive_while_it_died_is_noticed(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    """A killed process closes its sockets one by one: the one it listens at may be the last."""
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared)
    c = cluster(workers=1, ps=1, env={"TFSTYLE_SHARED_MEMORY": shared})
    with c.strategy.scope():
        v = td.Variable(torch.zeros(100_000))
    assert v.value().eq(0).all()
    listens, asked = connection.is_listening, []

    def first_it_does(address: str, unreachable: bool = False) -> bool:
        asked.append(address)
        return len(asked) == 1 or listens(address, unreachable)

    monkeypatch.setattr(connection, "is_listening", first_it_does)
    c.kill("ps", 0)
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match="is gone"):
        v.value()
    assert time.monotonic() - begin < 20  # not the 300 s of a wait
    assert len(asked) >= 2
