"""TCP connections whose ends stop, stay silent or break off: the server goes on, and values stay whole."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import cloudpickle
import pytest
import torch
from served_here import served_here
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import Header, Kind, pack_json, pack_message
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation
from tfstyle_dist.parameter_server.protocol.work import NO_WORK
from tfstyle_dist.parameter_server.server.loop import ParameterServer
from tfstyle_dist.parameter_server.transports import stream_socket

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
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
def two_threads() -> Iterator[None]:
    """Torch has two threads for an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(far: Callable[..., Any]) -> Iterator[tuple[Any, ParameterServer]]:
    """A cluster with the server in this process."""
    with served_here(far(start=False, coordinator=False)) as served:
        yield served


def place_of(variable: Any) -> int:
    return int(variable._tfstyle_record.shards[0].number)


def add_to(link: ServerLink, number: int, value: torch.Tensor) -> None:
    link.batch(NO_WORK, [Operation(Op.ADD, 0, number, 0, 0, value.nbytes)], [value], None)


def add_and_wait(link: ServerLink, number: int, value: torch.Tensor) -> None:
    add_to(link, number, value)
    link.finish()


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
    link.timeout = timedelta(seconds=30)
    c.signal("ps", 0, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):
        add_and_wait(link, place_of(v), torch.ones(LARGE))
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
    link.timeout = timedelta(seconds=1.2)
    with server.lock, pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        add_to(link, place_of(v), torch.ones(LARGE))
    link.timeout = timedelta(seconds=20)
    v.assign_add(torch.full((LARGE,), 2.0))
    assert v.value().eq(2).all()


def test_a_client_that_was_forgotten_while_it_sends_changes_nothing(here: Any) -> None:
    c, server = here
    with c.strategy.scope():
        v = td.Variable(torch.zeros(100_000))
    assert v.value().eq(0).all()
    (client,) = (client for client in server.sessions.clients.values() if client.connection is not None)
    connection: Any = client.connection
    begun, fill, going_on = threading.Event(), connection._fill, threading.Event()

    def slowly(room: memoryview) -> None:
        begun.set()
        assert going_on.wait(20)
        fill(room)

    connection._fill = slowly
    add_to(c.strategy.servers.links[0], place_of(v), torch.ones(100_000))
    assert begun.wait(20)
    time.sleep(0.1)  # now they are in the socket's buffer
    with server.lock:
        server.forget(client)
    going_on.set()
    connection.thread.join(20)
    assert v.value().eq(0).all()


def test_threads_that_cannot_be_started(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c, _ = here
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "tfstyle-ps-tcp":
            raise RuntimeError("can't start new thread")
        start(thread)

    with c.strategy.scope():
        v = td.Variable(torch.ones(LARGE // 16))
    link = c.strategy.servers.links[0]
    assert link.transport_name == "TCP"
    link.lose("is connected to once more", alive=True)
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert v.value().eq(1).all()
    assert link.transport_name == "ZeroMQ"


def test_a_handshake_over_tcp_is_refused(here: Any) -> None:
    """It could end other clients' sockets from this connection's thread, while the server's thread polls them."""
    c, server = here
    with c.strategy.scope():
        v = td.Variable(torch.zeros(10))
    assert float(v.value().sum()) == 0
    link = c.strategy.servers.links[0]
    body = pack_json({"role": "coordinator", "session": "another", "task": "x"})
    link.transport.send_message([pack_message(Header(Kind.HANDSHAKE, 1, meta_bytes=len(body)), body)])
    answer = link.transport.receive()
    assert Header.unpack(answer[0]).kind is Kind.ERROR
    assert server.state.session == c.strategy.servers.links[0].handshake["session"]


def ask_and_take_nothing(context: Any, server: ParameterServer, address: str, task: str, number: int) -> ServerLink:
    handshake = {"role": "worker", "session": server.state.session, "task": task}
    link = ServerLink(context, address, "server", handshake, timedelta(seconds=20))
    link.batch(NO_WORK, [Operation(Op.PULL, 0, number)], [], lambda answers: [])
    return link


@pytest.mark.usefixtures("two_threads")
def test_large_updates_are_made_by_one_thread_for_all(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c, server = here
    names: list[str] = []
    execute = server.execute_taken

    def note(client: Any, channel: Any) -> None:
        names.append(threading.current_thread().name)
        execute(client, channel)

    with c.strategy.scope():
        small, large = td.Variable(torch.zeros(100_000)), td.Variable(torch.zeros(1 << 20))
    monkeypatch.setattr(server, "execute_taken", note)
    for variable in (small, large):
        variable.assign_add(torch.ones(variable.shape))
        assert variable.value().eq(1).all()
    assert [name.rstrip("0123456789_") for name in names] == ["tfstyle-ps-tcp", "tfstyle-ps-table"]


def test_clients_that_take_nothing_or_vanish(here: Any) -> None:
    """What is leased to them comes back, the others go on, and the server ends with threads that are sending."""
    c, server = here
    with c.strategy.scope():
        v = td.Variable(torch.zeros(LARGE))
    assert v.value().eq(0).all()
    stored = server.state.table.variables[place_of(v)]
    context, address = zeromq_sockets.Context(None), c.spec["ps"][0]
    links = [ask_and_take_nothing(context, server, address, f"worker {n}", stored.number) for n in range(2)]
    wait_until(lambda: stored.segment is not None and sum(stored.segment._leased.values()) == 2)
    for number in range(3):
        assert v.value().eq(number).all()
        v.assign_add(torch.ones(LARGE))
    wait_until(lambda: sum(stored.segment._leased.values()) == 2)
    links[0].transport.socket._socket.close()
    wait_until(lambda: sum(stored.segment._leased.values()) == 1)
    again = ask_and_take_nothing(context, server, address, "worker 1", stored.number)  # the same task, started again
    wait_until(lambda: list(stored.segment._leased) == [stored.parameter.data_ptr()])
    assert len(stored.segment._spares) <= 2
    c.strategy.close()
    wait_until(lambda: not server.sessions.clients and not stored.segment._leased)
    for link in (*links, again):
        link.close(goodbye=False)
    context.close()


def test_a_server_that_is_late_hears_the_goodbye(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_socket, "_END_SECONDS", 20.0)  # of a busy machine
    c = far()
    with c.strategy.scope():
        v = td.Variable(torch.zeros(100_000))
    assert v.value().eq(0).all()
    c.signal("ps", 0, signal.SIGSTOP)
    threading.Timer(1.6, c.signal, ("ps", 0, signal.SIGCONT)).start()
    c.strategy.close()
    assert c.wait("ps", 0) == 0


TRANSPORTS = ({"TFSTYLE_SHARED_MEMORY": "1"}, {"TFSTYLE_SHARED_MEMORY": "0"}, {"TFSTYLE_SHARED_MEMORY": "0"},
        {"TFSTYLE_SHARED_MEMORY": "0", "TFSTYLE_PS_TCP": "0"})  # fmt: skip


def test_clients_on_different_transports_see_whole_values(cluster: Any) -> None:
    """One worker uses shared memory, two TCP, one ZeroMQ; all read and write the same variables of one server."""
    c = cluster(workers=len(TRANSPORTS), ps=1, start=False, coordinator=False)
    c.start("ps", 0)
    for index, environment in enumerate(TRANSPORTS):
        c._env = environment
        c.start("worker", index)
    c.make_coordinator()
    with c.strategy.scope():
        variables = [td.Variable(torch.zeros(size)) for size in (1000, 60_000, 400_000)]
        net = torch.nn.Linear(1, 400_000, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.0)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)]

    def work(number: int) -> tuple[str, bool]:
        values = [v.value() for v in variables]
        whole = all(bool(value.eq(value[0]).all()) for value in values)
        weight = net.weight.detach()
        whole = whole and bool(weight.eq(weight[0]).all())
        for v in variables:
            if number % 5 == 4:
                v.assign(torch.full(v.shape, float(-number)))
            else:
                v.assign_add(torch.ones(v.shape))
        optimizers[number % 2].zero_grad()
        net.weight.sum().backward()
        optimizers[number % 2].step()
        weight = net.weight.detach()
        return lane(), whole and bool(weight.eq(weight[0]).all())

    c.await_workers()
    results = [c.coordinator.schedule(work, args=(n,)) for n in range(120)]
    c.coordinator.join(timeout=50)
    found = [r.fetch() for r in results]
    assert all(whole for _, whole in found)
    assert {lane for lane, _ in found} == {"shared memory", "TCP", "ZeroMQ"}
    assert c.statistics()[0]["applied"] >= 4 * 120


def lane() -> str:
    return str(td.get_strategy().servers.links[0].transport_name)
