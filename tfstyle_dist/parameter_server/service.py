"""The process of one parameter server: takes requests from its sockets and works on its table."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from typing import Any

import torch

from tfstyle_dist.core import env
from tfstyle_dist.core.errors import CancelledError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server import wire, zmq_link
from tfstyle_dist.parameter_server.answers import OverZmq, Way, refusal, send_answer
from tfstyle_dist.parameter_server.carriers import StreamPort
from tfstyle_dist.parameter_server.clients import Client
from tfstyle_dist.parameter_server.door import Door, Tokens
from tfstyle_dist.parameter_server.server_state import ServerState
from tfstyle_dist.parameter_server.table import Answer
from tfstyle_dist.parameter_server.together import Write, rate_of, write_together
from tfstyle_dist.parameter_server.wire import CHUNK, Header, Kind, WireError
from tfstyle_dist.shm.namespaces import sharing_id

_MAX_CLIENTS = 4096
_SILENT_SECONDS = 5.0
"""A coordinator tells every second that it lives; one that has not for so long is taken for dead."""


class ParameterServer(ServerState):
    """Serves one table.

    One thread takes what comes by ZeroMQ and through the door; each TCP connection has a thread of its own. Whoever
    works holds the lock.

    Args:
        context: sockets and keys.
        address: ``host:port`` to listen at.
        name: of the task, for messages, e.g. ``"/job:ps/task:0"``.
        patience: seconds without a sign of life of the coordinator after which ``run`` gives up.
    """

    def __init__(self, context: zmq_link.Context, address: str, name: str, patience: float) -> None:
        super().__init__(name)
        self._context, self._patience = context, patience
        self._host = zmq_link.bindable(address.rpartition(":")[0]).strip("[]")
        self._socket = context.listen(address)
        self._clients: dict[bytes, Client] = {}
        self.incarnation = uuid.uuid4().hex
        self._ended = False
        self._heard: float | None = None
        self._former: set[str] = set()  # sessions that a newer one has displaced
        self._poller = zmq_link.poller(self._socket)
        self.lock = threading.Lock()
        self._tokens = Tokens()
        self._door: Door | None = None
        self._port: StreamPort | None = None
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._poller.register(self._ear.fileno(), zmq_link.POLLIN)
        self._others = False  # more clients wait: a write may be made together with theirs
        self._together: dict[Client, Write] = {}  # writes that wait for others

    # ---- life -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing a waiting thread must look after: ``run`` never sits in other people's code for long."""

    def run(self) -> None:
        """Serves until the coordinator says goodbye.

        Raises:
            UnavailableError: a coordinator was there, and then was silent for too long.
        """
        torch.set_grad_enabled(False)  # of this thread
        try:
            while not self._ended:
                events = self._poller.poll(self._rest_ms())
                with self.lock:
                    self._turn(events)
        finally:
            with self.lock:
                for client in list(self._clients.values()):
                    self.forget(client)
            if self._port is not None:
                self._port.shut()
            if self._door is not None:
                self._door.shut()
            self._socket.close(0)
            self._bell.close()
            self._ear.close()
            self.stop_keeping(forget=self._ended)
            self.table.shared.close()

    def _turn(self, events: list[tuple[Any, int]]) -> None:
        """Takes what has come, and does what is due."""
        visits = []
        for entry, event in events:
            if entry == self._socket:
                self._take()
            elif entry == self._ear.fileno():
                self._ear.recv(64)
            elif self._port is not None and entry == self._port.number:
                self._port.admit()
            elif self._door is not None and entry == self._door.number:
                self._door.admit()
            else:
                visits.append((entry, event))
        for entry, event in visits:
            self._visit(entry, event, len(visits) > 1)
        if self._door is not None:
            self._door.send_strangers_away()
        self._write_together()
        if self.jobs.busy:
            self.jobs.tick()
        if self.keeper is not None:
            self.keeper.tick()
        if self._heard is not None and time.monotonic() - self._heard > self._patience:
            raise zmq_link.silence(self._name, self._patience)

    def _rest_ms(self) -> int:
        """How long nothing needs to be done unless a message comes."""
        if self.jobs.busy:
            return 2
        return 500 if self.keeper is None else self.keeper.rest_ms(500)

    def _take(self) -> None:
        """Takes the messages that are there, but not for ever: the coordinator's silence must be noticed."""
        for _ in range(256):
            try:
                identity = self._socket.recv(zmq_link.DONTWAIT)
            except zmq_link.Again:
                return
            client = self._clients.get(identity)
            if client is not None and client.header is not None:
                self._take_chunk(client)
                continue
            parts = self._socket.recv_multipart()
            if client is None:
                self._take_first(Client(identity, OverZmq(self._socket, identity)), parts)
            elif client.skip:
                client.skip = max(client.skip - len(parts[0]), 0)
            elif not client.refused:
                self.take_message(client, parts, client.way)

    def _take_first(self, client: Client, parts: list[bytes]) -> None:
        """Takes the first message of a client, which is one of this server's only if it introduces itself well."""
        if len(self._clients) >= _MAX_CLIENTS:
            full = UnavailableError(f"{self._name} takes no more clients: it has {_MAX_CLIENTS}.")
            get_logger().warning("%s", full)
            self._send(client, client.way, [refusal(0, full)])
            return
        self.take_message(client, parts, client.way)
        if client.role:
            self._clients[client.identity] = client

    def _visit(self, number: int, event: int, others: bool) -> None:
        """Takes the messages of a client that came through the door.

        Args:
            number: of the connection.
            event: what the poller saw.
            others: more clients wait: this one's write may be made together with theirs.
        """
        visitor = None if self._door is None else self._door.visitors.get(number)
        if self._door is None or visitor is None:
            return
        here = (not event & zmq_link.POLLOUT or visitor.flush()) and visitor.read()
        try:
            while here and (parts := visitor.frames.take()) is not None:
                if visitor.client is None:
                    here = self._door.identify(visitor, parts[0])
                elif not visitor.client.refused:
                    if visitor.client in self._together:
                        self._write_together()
                    self._others = others
                    self.take_message(visitor.client, parts, visitor)
                here = here and self._door.visitors.get(number) is visitor
        except WireError as error:
            get_logger().warning("%s closes a connection: %s", self._name, error)
            here = False
        finally:
            self._others = False
        if not here:
            self._door.close(visitor)
            if visitor.client is not None:
                self.forget(visitor.client)
        elif visitor.waits or event & zmq_link.POLLOUT:
            self._poller.modify(number, zmq_link.POLLIN | (zmq_link.POLLOUT if visitor.waits else 0))

    def _write_together(self) -> None:
        """Makes the writes that have waited for others."""
        waiting, self._together = self._together, {}
        by_variable: dict[int, list[tuple[Client, Write]]] = {}
        for client, write in waiting.items():
            by_variable.setdefault(write.operation.variable, []).append((client, write))
        for entries in by_variable.values():
            try:
                answers: list[Any] = write_together(self.table, [write for _, write in entries])
            except Exception as error:
                answers = [error] * len(entries)
            for (client, write), answer in zip(entries, answers, strict=True):
                way = client.visitor or client.way
                try:
                    if isinstance(answer, Exception):
                        raise answer
                    self._answer(client, way, write.header, [write.operation], write.data, answer)
                except Exception as error:
                    self._send(client, way, [refusal(write.header.request, error)])

    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    def forget(self, client: Client) -> None:
        """A client is gone: its shared memory and what it used in place are free."""
        self._clients.pop(client.identity, None)
        client.drop_segment()
        self._together.pop(client, None)
        self.table.shared.leave(client.column)
        client.column, client.role = -1, ""
        self._tokens.forget(client)
        if self._door is not None and client.visitor is not None:
            self._door.close(client.visitor)
        if client.carrier is not None:
            client.carrier.shut()

    def take_message(self, client: Client, parts: list[bytes], way: Way) -> None:
        """Works on a message.

        Args:
            client: who sent it.
            parts: of it.
            way: that it came; the answer takes the same.
        """
        header = None
        try:
            header = Header.unpack(parts[0])
            self._handle(client, header, parts, way)
        except WireError as error:
            # Nothing sensible can follow on a connection that breaks the protocol.
            get_logger().warning("%s refuses a message of %s: %s", self._name, client.name, error)
            client.refused = True
            client.drop_buffer()
            self._send(client, way, [refusal(0 if header is None else header.request, error)])
        except Exception as error:
            if header is not None and header.kind is Kind.BATCH and not header.flags & wire.FLAG_INLINE:
                client.skip = 0 if header.flags & wire.FLAG_SHARED else header.data_bytes
            self._send(client, way, [refusal(0 if header is None else header.request, error)])

    def _send(self, client: Client, way: Way, parts: list[Any]) -> None:
        if not way.send(parts):
            self.forget(client)

    # ---- messages ---------------------------------------------------------------------------------------------

    def _handle(self, client: Client, header: Header, parts: list[bytes], way: Way) -> None:
        meta = memoryview(parts[0])[wire.HEADER_SIZE :]
        if header.kind is Kind.HELLO:
            if way is not client.way:
                raise WireError("a HELLO comes by ZeroMQ")
            body = wire.pack_json(self._hello(client, wire.unpack_json(meta)))
            self._send(client, way, [wire.message(Header(Kind.OK, header.request, meta_bytes=len(body)), body)])
            return
        if not client.role:
            raise WireError("the first message must be a HELLO")
        if client.role == "coordinator":
            self._heard = time.monotonic()
        if header.kind is Kind.BATCH:
            self._batch(client, header, meta, parts, way)
        elif way is client.carrier:
            raise WireError("tensors alone come by plain TCP")
        elif header.kind is Kind.CALL:
            asked = wire.unpack_json(meta)
            door = asked.get("method") == "door"
            body = wire.pack_json(self._let_in(client, asked) if door else self.call(client, asked, parts[1:]))
            self._send(client, way, [wire.message(Header(Kind.OK, header.request, meta_bytes=len(body)), body)])
        elif header.kind is Kind.GOODBYE:
            if client.role == "coordinator":
                self._ended = True
                self._bell.send(b"!")
            self.forget(client)
        elif header.kind is Kind.ALIVE:
            if client.role == "coordinator" and meta:
                below, *unfinished = wire.unpack_numbers(meta)
                if len(unfinished) % 2:
                    raise WireError("a range of functions has no end")
                self.table.settle(header.low_water, below, unfinished)
        else:
            raise WireError(f"a server does not take messages of kind {header.kind.name}")

    def _let_in(self, client: Client, asked: dict[str, Any]) -> dict[str, Any]:
        """Where a client finds a plain socket, and the token that it has to show there."""
        if asked.get("tcp") and not env.parameter_server_tcp(self._context.keys is not None):
            raise PermissionError(f"{self._name} lets no tensors come by plain TCP (TFSTYLE_PS_TCP)")
        try:
            if asked.get("tcp"):
                if self._port is None:
                    self._port = StreamPort(self._host, self._name, self._tokens, self)
                    self._poller.register(self._port.number, zmq_link.POLLIN)
                return {"token": self._tokens.give(client), "port": self._port.port}
            if self._door is None:
                self._door = Door(self._poller, zmq_link.POLLIN, self._tokens, self._name)
        except OSError as error:  # e.g. no file left: the client goes on by ZeroMQ
            raise PermissionError(f"{self._name} can open no socket for it: {error}") from error
        return {"token": self._tokens.give(client), "name": self._door.name}

    def _hello(self, client: Client, meta: dict[str, Any]) -> dict[str, Any]:
        role, session = str(meta.get("role")), str(meta.get("session"))
        if role not in ("coordinator", "worker"):
            raise WireError(f"unknown role {role!r}")
        if role == "worker" and not self.session:
            raise UnavailableError(f"{self._name} has not heard from a coordinator yet.")
        if session in self._former or (role == "worker" and session != self.session):
            raise self._displaced()
        if role == "coordinator":
            if session != self.session:
                self._check_snapshots(meta.get("snapshots"))
                self._leave(client)
                self.begin_session(session, meta.get("snapshots"))
            self._heard = time.monotonic()
        client.role, client.name = role, str(meta.get("task"))[:200]
        self._forget_earlier(client)
        return {
            "incarnation": self.incarnation, "task": self._name, "host": sharing_id(),
            "restored": self.restored, "empty": not self.table.variables,
        }  # fmt: skip

    def _check_snapshots(self, wanted: dict[str, Any] | None) -> None:
        """A new coordinator deletes the snapshots in its folder: they must not be those of one that is at work.

        Raises:
            UnavailableError: they are.
        """
        lives = self._heard is not None and time.monotonic() - self._heard < _SILENT_SECONDS
        if lives and wanted is not None and self.keeper is not None and self.keeper.keeps_in(str(wanted["folder"])):
            raise UnavailableError(
                f"{self._name} works for a coordinator that lives and keeps its snapshots in {wanted['folder']!r}; a "
                "second one would delete them. End the first program, or give this one a snapshot_folder and tasks of "
                "its own."
            )

    def _leave(self, newer: Client) -> None:
        """Ends the work for the coordinator before: it and its workers are told."""
        if self.session:
            self._former.add(self.session)
        for other in list(self._clients.values()):
            if other is not newer:
                self._send(other, other.way, [refusal(0, self._displaced())])
                self.forget(other)

    def _displaced(self) -> CancelledError:
        return CancelledError(f"{self._name} works for another coordinator now.")

    def _forget_earlier(self, client: Client) -> None:
        """A task that was started again, or connects anew: what its earlier link had is not needed."""
        for other in list(self._clients.values()):
            if other is not client and (other.role, other.name) == (client.role, client.name):
                self.forget(other)

    def _batch(self, client: Client, header: Header, meta: memoryview, parts: list[bytes], way: Way) -> None:
        operations = wire.unpack_operations(meta)
        if way is client.carrier and self._context.keys is not None:
            # Anybody on the network may have written it; the coordinator tells the same over its encrypted link.
            header = header._replace(low_water=0)
        self.table.check(header, operations)
        if header.flags & wire.FLAG_SHARED:
            if client.segment is None or header.data_bytes > client.segment.half:
                raise WireError("the data is said to be in shared memory, but there is no segment of that size")
            data = client.segment.request(header.data_bytes)
            alone = not self._others or len(operations) != 1 or rate_of(self.table, operations[0]) is None
            if not alone:
                self._together[client] = Write(header, operations[0], data)
                return
            self._execute(client, way, header, operations, data)
        elif header.flags & wire.FLAG_INLINE:
            if len(parts) != 2 or len(parts[1]) != header.data_bytes:
                raise WireError(f"{header.data_bytes} bytes were announced")
            data = torch.frombuffer(bytearray(parts[1]), dtype=torch.uint8)
            self._execute(client, way, header, operations, data)
        elif header.data_bytes == 0:
            self._execute(client, way, header, operations, torch.empty(0, dtype=torch.uint8))
        else:
            if way is not (client.carrier or client.way):
                raise WireError("tensors do not come this way")
            client.room(header.data_bytes)
            client.header, client.operations, client.taken = header, operations, 0

    def _take_chunk(self, client: Client) -> None:
        """Takes the next bytes of a batch by ZeroMQ."""
        header = client.header
        assert header is not None
        left = header.data_bytes - client.taken
        size = self._socket.recv_into(client.view[client.taken : client.taken + min(left, CHUNK)])
        if size > left or self._socket.getsockopt(zmq_link.RCVMORE):
            while self._socket.getsockopt(zmq_link.RCVMORE):
                self._socket.recv()
            client.header, client.refused = None, True
            error = WireError(f"{left} more bytes were announced")
            self._send(client, client.way, [refusal(header.request, error)])
            return
        client.taken += size
        if client.taken == header.data_bytes:
            self.execute_taken(client, client.way)

    def execute_taken(self, client: Client, way: Way) -> None:
        """Carries out a batch whose bytes have come in pieces.

        Args:
            client: who sent it.
            way: that it came.
        """
        header, client.header = client.header, None
        if header is None or client.refused or not client.role:
            return  # it was refused or forgotten while they came
        try:
            # Meanwhile the closure may have been started elsewhere.
            self.table.check(header, client.operations)
            self._execute(client, way, header, client.operations, client.room(header.data_bytes))
        except Exception as error:
            self._send(client, way, [refusal(header.request, error)])

    def _execute(
        self, client: Client, way: Way, header: Header, operations: list[wire.Operation], data: torch.Tensor
    ) -> None:
        self._answer(client, way, header, operations, data, self.table.execute(header, operations, data))

    def _answer(
        self,
        client: Client,
        way: Way,
        header: Header,
        operations: list[wire.Operation],
        data: torch.Tensor,
        answer: Answer,
    ) -> None:
        if self.keeper is not None:
            self.keeper.note_batch(header, operations, answer.operations, data)
        if not send_answer(way, client.segment, header, answer):
            self.forget(client)
