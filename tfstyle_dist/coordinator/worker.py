"""The process of one worker task: takes functions from the coordinator and runs them."""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.context import on_worker
from tfstyle_dist.coordinator.references import Incoming
from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import OutOfRangeError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server import pickling, wire, zmq_link
from tfstyle_dist.parameter_server.cluster import as_addresses
from tfstyle_dist.parameter_server.records import RemoteRecord
from tfstyle_dist.parameter_server.variable import ServerVariable
from tfstyle_dist.parameter_server.wire import Header, Kind, WireError
from tfstyle_dist.parameter_server.work import Work
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.parameter_server import ParameterServerStrategy


class _Function:
    """A registered function; unpickled when it first runs."""

    __slots__ = ("call", "fixed", "parts", "reads")

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts: Sequence[Any] | None = parts
        self.call: Any = None
        self.fixed: list[RemoteRecord] = []  # module parameters and buffers it can reach
        self.reads: list[RemoteRecord] = []  # what its last run read


class NoValueError(Exception):
    """A result among the arguments is not here; the coordinator will send it."""


class _Values:
    """Results that functions on this worker may get as arguments, pickled; the oldest are given up."""

    MOST, MOST_BYTES = 64, 256 << 20

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def put(self, number: int, parts: Sequence[Any]) -> None:
        """Keeps a result."""
        self._parts.pop(number, None)
        self._parts[number] = [bytes(part) for part in parts]

    def get(self, number: int) -> Any:
        """A copy of a result.

        Raises:
            NoValueError: it is not here.
        """
        if number not in self._parts:
            raise NoValueError(number)
        return pickling.loads(self._parts[number])

    def trim(self) -> None:
        """Between two functions: what the next one needs is sent together with it."""
        if not self._parts:
            return
        size = sum(len(part) for parts in self._parts.values() for part in parts)
        while self._parts and (len(self._parts) > self.MOST or size > self.MOST_BYTES):
            size -= sum(map(len, self._parts.pop(next(iter(self._parts)))))


class _Session:
    """The work for one coordinator."""

    def __init__(self, meta: dict[str, Any], task: str, index: int) -> None:
        self.name, self.index = str(meta["session"]), index
        cluster = as_addresses(meta["cluster"])
        self.strategy = ParameterServerStrategy.on_worker(
            cluster, self.name, task, meta.get("snapshots"), meta.get("wire")
        )
        self.functions: dict[int, _Function] = {}
        self.factories: dict[int, Sequence[Any]] = {}
        self.values = _Values()
        self._resources: dict[int, Any] = {}

    def resource(self, number: int) -> Any:
        """This worker's object of a per-worker resource, made at its first use."""
        if number not in self._resources:
            make = pickling.loads(self.factories[number], self.incoming())
            self._resources[number] = make()
        return self._resources[number]

    def incoming(self) -> Incoming:
        """Resolves references."""
        return Incoming(self.strategy, self.index, self.resource, self.values.get)

    def close(self) -> None:
        """Leaves the servers."""
        self.strategy.close()


class WorkerTask:
    """Serves one worker task.

    Args:
        context: sockets and keys.
        address: ``host:port`` to listen at.
        job: name of the job.
        index: of the task.
        patience: seconds without a sign of life of the coordinator after which ``run`` gives up.
    """

    def __init__(self, context: zmq_link.Context, address: str, job: str, index: int, patience: float) -> None:
        self._name, self._index, self._patience = f"/job:{job}/task:{index}", index, patience
        self._socket = context.listen(address)
        self._incarnation = uuid.uuid4().hex
        self._coordinators: set[bytes] = set()
        self._session: _Session | None = None
        self._heard: float | None = None
        self._ended = False
        self._connections = zmq_link.ConnectionCount(self._socket)
        self._alone_since: float | None = None
        self._early: list[list[bytes]] = []  # a message that was looked at while a function started

    def check(self) -> None:
        """Called by the thread that waits for this task, which may be stuck in a function that never returns.

        Raises:
            UnavailableError: no coordinator has been connected for too long.
        """
        if self._connections.count() > 0 or not self._connections.ever:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > self._patience:
            raise UnavailableError(f"{self._name} has had no coordinator for {self._patience:g} s and ends.")

    def run(self) -> None:
        """Runs functions until the coordinator says goodbye.

        Raises:
            UnavailableError: a coordinator was there, and then was silent for too long.
        """
        poller = zmq_link.poller(self._socket)
        try:
            while not self._ended:
                if self._early or poller.poll(500):
                    parts = self._early.pop() if self._early else self._socket.recv_multipart()
                    self._take(parts[0], parts[1:])
                elif self._heard is not None and time.monotonic() - self._heard > self._patience:
                    raise zmq_link.silence(self._name, self._patience)
        finally:
            if self._session is not None:
                self._session.close()
            self._connections.close()
            self._socket.close(0)

    def _take(self, identity: bytes, parts: list[bytes]) -> None:
        header = None
        try:
            header = Header.unpack(parts[0])
            meta = memoryview(parts[0])[wire.HEADER_SIZE :]
            if header.kind is Kind.HELLO:
                self._hello(identity, wire.unpack_json(meta))
                return
            if identity not in self._coordinators:
                raise WireError("the first message must be the HELLO of a coordinator")
            self._heard = time.monotonic()
            if header.kind is Kind.RUN:
                self._run(identity, header, messages.numbers(meta), parts[1:])
                self._heard = time.monotonic()  # what it sent meanwhile is still in the queue
            elif header.kind is Kind.CALL:
                self._register(wire.unpack_json(meta), parts[1:])
            elif header.kind is Kind.GOODBYE:
                self._ended = True
            elif header.kind is not Kind.ALIVE:
                raise WireError(f"a worker does not take messages of kind {header.kind.name}")
        except Exception as error:
            get_logger().warning("%s refuses a message: %s", self._name, error)
            body = wire.pack_error(error)
            self._send(identity, [wire.message(Header(Kind.ERROR, 0, meta_bytes=len(body)), body)])

    def _send(self, identity: bytes, parts: list[Any]) -> None:
        try:
            self._socket.send_multipart([identity, *parts])
        except zmq_link.ZMQError:
            self._coordinators.discard(identity)  # that connection is gone; the coordinator has noticed

    def _hello(self, identity: bytes, meta: dict[str, Any]) -> None:
        if meta.get("role") != "coordinator":
            raise WireError(f"unknown role {meta.get('role')!r}")
        name = str(meta["session"])
        if self._session is None or self._session.name != name:
            if self._session is not None:
                self._session.close()
            self._coordinators.clear()
            self._session = _Session(meta, self._name, self._index)
        self._coordinators.add(identity)
        self._heard = time.monotonic()
        self._send(identity, [messages.plain(Kind.OK, {"incarnation": self._incarnation, "task": self._name})])

    def _register(self, meta: dict[str, Any], frames: list[bytes]) -> None:
        assert self._session is not None
        parts = wire.join([int(n) for n in meta["sizes"]], frames)
        if meta["method"] == "function":
            self._session.functions.setdefault(int(meta["number"]), _Function(parts))
        elif meta["method"] == "resource":
            self._session.factories.setdefault(int(meta["number"]), parts)
        elif meta["method"] == "value":
            self._session.values.put(int(meta["number"]), parts)
        else:
            raise WireError(f"unknown method {meta['method']!r}")

    def _following(self) -> list[RemoteRecord]:
        """Parameters that the next function will pull, if it is here already."""
        assert self._session is not None
        try:
            self._early.append(self._socket.recv_multipart(zmq_link.DONTWAIT))
            identity, head = self._early[0][:2]
            header = Header.unpack(head)
            if header.kind is not Kind.RUN or identity not in self._coordinators or header.attempt > 1:
                return []
            function = self._session.functions.get(messages.numbers(memoryview(head)[wire.HEADER_SIZE :])[0])
        except (zmq_link.Again, WireError, ValueError, IndexError):
            return []  # none, or one that will be refused when it is its turn
        return [] if function is None else list(function.fixed)

    # ---- running ----------------------------------------------------------------------------------------------

    def _run(self, identity: bytes, header: Header, numbers: list[int], frames: list[bytes]) -> None:
        assert self._session is not None
        session, failed, flags = self._session, False, 0
        try:
            function = session.functions[numbers[0]]
            arguments = wire.join(numbers[1:], frames)
            work = Work(header.closure, header.attempt, header.low_water)
            parts = pickling.dumps(run_function(session, function, work, arguments, self._following))
            if header.flags & wire.FLAG_KEEP:
                session.values.put(header.closure, parts)
                flags |= wire.FLAG_KEEP
        except BaseException as error:
            failed, parts = True, _error_parts(error, self._name)
            flags |= wire.FLAG_NO_VALUE if isinstance(error, NoValueError) else 0
        session.values.trim()
        # Even if the function did not notice: what it had written to that server may be lost.
        flags |= wire.FLAG_AGAIN if session.strategy.servers.may_return else 0
        self._send(identity, messages.result(header.closure, header.attempt, failed, parts, flags))


def run_function(
    session: _Session,
    function: _Function,
    work: Work,
    arguments: Sequence[Any],
    following: Callable[[], Sequence[RemoteRecord]],
) -> Any:
    """Calls a scheduled function in this process; its value with variables read and tensors detached.

    ``following`` tells what the next function will pull.
    """
    strategy = session.strategy
    servers = strategy.servers
    with on_worker(session.index), entered(Frame(strategy)):
        servers.begin(work)
        try:
            if function.parts is not None:
                incoming = session.incoming()
                function.call = pickling.loads(function.parts, incoming)
                function.fixed, function.parts = list(incoming.seen), None
            incoming = session.incoming()
            args, kwargs = pickling.loads(arguments, incoming)
            fixed = [*function.fixed, *incoming.seen]
            if fixed or function.reads:
                servers.refresh([*fixed, *function.reads])
            if servers.options.ahead:
                servers.ask_ahead(following())
            try:
                value = function.call(*args, **kwargs)
            except StopIteration:
                raise OutOfRangeError("An iterator came to its end in a scheduled function.") from None
            value = nest.map_structure(_exported, value)
            strategy.remote_store.push_buffers(fixed)
            function.reads = list(servers.reads)
        except BaseException:
            _settle(servers)
            raise
        servers.end()
    return value


def _settle(servers: Any) -> None:
    """What a failing function had written before stays written, as in TensorFlow."""
    try:
        servers.end()
    except Exception as error:
        get_logger().warning("a write of a function that failed was not taken: %s", error)


def _exported(leaf: Any) -> Any:
    if isinstance(leaf, ServerVariable):
        return leaf.value()
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach()
        return torch.Tensor(leaf) if type(leaf) is not torch.Tensor and leaf.dtype is torch.float32 else leaf.to("cpu")
    return leaf


def _error_parts(error: BaseException, where: str) -> list[Any]:
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):
        error = RuntimeError(f"a function ended with {error!r}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(f"[tfstyle_dist] raised in a scheduled function on {where}:\n{text}")
    try:
        parts = pickling.dumps(error)
        pickling.loads(parts)
    except Exception:
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        replacement.add_note(f"[tfstyle_dist] raised in a scheduled function on {where}:\n{text}")
        parts = pickling.dumps(replacement)
    return parts
