"""The process of one parameter server: takes requests from its socket and works on its table."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch

from tfstyle_dist.core.errors import CancelledError, InvalidArgumentError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server import streams, wire, zmq_link
from tfstyle_dist.parameter_server.clients import Client
from tfstyle_dist.parameter_server.door import Door, Visitor
from tfstyle_dist.parameter_server.server_state import ServerState
from tfstyle_dist.parameter_server.table import Answer
from tfstyle_dist.parameter_server.together import Write, rate_of, write_together
from tfstyle_dist.parameter_server.wire import CHUNK, Header, Kind, WireError

_MAX_CLIENTS = 4096


class ParameterServer(ServerState):
    """Serves one table.

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
        self._poller = zmq_link.poller(self._socket)
        self._door: Door | None = None
        self._others = False
        self._through: Visitor | None = None  # the connection that the message at work came through

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
                visits = []
                for entry, event in self._poller.poll(self._rest_ms()):
                    if entry == self._socket:
                        self._take()
                    elif self._door is not None and self._door.is_entry(entry):
                        self._door.admit(entry)
                    else:
                        visits.append((entry, event))
                for entry, event in visits:
                    self._visit(entry, event, len(visits) > 1)
                self._write_together()
                if self.jobs.busy:
                    self.jobs.tick()
                if self.keeper is not None:
                    self.keeper.tick()
                if self._heard is not None and time.monotonic() - self._heard > self._patience:
                    raise zmq_link.silence(self._name, self._patience)
        finally:
            for client in list(self._clients.values()):
                self._forget(client)
            if self._door is not None:
                self._door.shut()
            self._socket.close(0)
            self.stop_keeping(forget=self._ended)
            self.table.shared.close()

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
                self._take_chunk(identity, client)
                continue
            parts = self._socket.recv_multipart()
            if client is None:
                if len(self._clients) >= _MAX_CLIENTS:
                    get_logger().warning("%s refuses another client: it has %d", self._name, _MAX_CLIENTS)
                    continue
                client = self._clients[identity] = Client(identity)
            if client.refused:
                continue
            if client.skip:
                client.skip = max(client.skip - len(parts[0]), 0)
                continue
            self._take_message(identity, client, parts)

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
        here = not event & zmq_link.POLLOUT or visitor.flush()
        self._through = visitor
        try:
            if here and _expects_data(visitor):
                here = self._take_data(visitor)
            if here and not _expects_data(visitor):
                here = visitor.read()
            while here and not _expects_data(visitor) and (parts := visitor.frames.take()) is not None:
                if visitor.client is None:
                    here = self._door.identify(visitor, parts[0])
                elif not visitor.client.refused:
                    if visitor.client in self._together:
                        self._write_together()
                        self._through = visitor
                    self._others = others
                    self._take_message(visitor.client.identity, visitor.client, parts)
                here = here and self._door.visitors.get(number) is visitor
                if here and _expects_data(visitor):
                    here = self._take_data(visitor)
        except WireError as error:
            get_logger().warning("%s closes a connection: %s", self._name, error)
            here = False
        finally:
            self._through, self._others = None, False
        if not here:
            self._door.close(visitor)
            if visitor.client is not None:
                self._forget(visitor.client)
        elif visitor.waits or event & zmq_link.POLLOUT:
            self._poller.modify(number, zmq_link.POLLIN | (zmq_link.POLLOUT if visitor.waits else 0))

    def _take_data(self, visitor: Visitor) -> bool:
        """Takes the tensors' bytes of a request as far as they are there; ``False``: the client is gone."""
        client: Client = visitor.client
        while client.skip:
            count = visitor.read_into(memoryview(bytearray(min(client.skip, CHUNK))))
            if count <= 0:
                return count == 0
            client.skip -= count
        while client.header is not None:
            room = wire.tensor_bytes(client.buffer)[client.taken : client.header.data_bytes]
            count = visitor.read_into(room)
            if count <= 0:
                return count == 0
            client.taken += count
            if client.taken == client.header.data_bytes:
                self._execute_taken(client)
        return True

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
                self._through = client.visitor
                if isinstance(answer, Exception):
                    self._refuse(client.identity, write.header.request, answer)
                else:
                    self._answer(client.identity, client, write.header, [write.operation], write.data, answer)
        self._through = None

    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    def _forget(self, client: Client) -> None:
        """A client is gone: its shared memory and what it used in place are free."""
        self._clients.pop(client.identity, None)
        client.drop_segment()
        self._together.pop(client, None)
        self.table.shared.leave(client.column)
        client.column, client.role = -1, ""
        if self._door is not None:
            self._door.forget(client)
            if client.visitor is not None:
                self._door.close(client.visitor)

    def _take_message(self, identity: bytes, client: Client, parts: list[bytes]) -> None:
        header = None
        try:
            header = Header.unpack(parts[0])
            self._handle(identity, client, header, parts)
        except WireError as error:
            # Nothing sensible can follow on a connection that breaks the protocol.
            get_logger().warning("%s refuses a message of %s: %s", self._name, client.name, error)
            client.refused = True
            client.buffer = torch.empty(0, dtype=torch.uint8)
            self._refuse(identity, 0 if header is None else header.request, error)
        except Exception as error:
            if header is not None and header.kind is Kind.BATCH and not header.flags & wire.FLAG_INLINE:
                client.skip = 0 if header.flags & wire.FLAG_SHARED else header.data_bytes
            self._refuse(identity, 0 if header is None else header.request, error)

    def _refuse(self, identity: bytes, request: int, error: BaseException) -> None:
        meta = wire.pack_error(error)
        self._send(identity, [wire.message(Header(Kind.ERROR, request, meta_bytes=len(meta)), meta)])

    def _send(self, identity: bytes, parts: list[Any]) -> bool:
        try:
            if self._through is not None:
                if self._through.send(parts):
                    return True
            else:
                self._socket.send_multipart([identity, *parts])
                return True
        except zmq_link.ZMQError:
            pass
        if (client := self._clients.get(identity)) is not None:  # it is gone
            self._forget(client)
        return False

    # ---- messages ---------------------------------------------------------------------------------------------

    def _handle(self, identity: bytes, client: Client, header: Header, parts: list[bytes]) -> None:
        meta = memoryview(parts[0])[wire.HEADER_SIZE :]
        if header.kind is Kind.HELLO:
            self._hello(identity, client, header, wire.unpack_json(meta))
            return
        if not client.role:
            raise WireError("the first message must be a HELLO")
        if client.role == "coordinator":
            self._heard = time.monotonic()
        if header.kind is Kind.BATCH:
            self._batch(identity, client, header, meta, parts)
        elif header.kind is Kind.CALL:
            asked = wire.unpack_json(meta)
            if asked.get("method") == "door":
                self._door = self._door or Door(self._poller, zmq_link.POLLIN)
                answer: dict[str, Any] = {"name": self._door.name, "token": self._door.token(client)}
                if asked.get("tcp"):
                    if self._context.keys is not None:
                        raise PermissionError("with keys tensors travel encrypted, by ZeroMQ")
                    answer["port"] = self._door.port(self._host)
            else:
                answer = self.call(client, asked, parts[1:])
            body = wire.pack_json(answer)
            self._send(identity, [wire.message(Header(Kind.OK, header.request, meta_bytes=len(body)), body)])
        elif header.kind is Kind.GOODBYE:
            self._ended = self._ended or client.role == "coordinator"
            self._forget(client)
        elif header.kind is not Kind.ALIVE:
            raise WireError(f"a server does not take messages of kind {header.kind.name}")

    def _hello(self, identity: bytes, client: Client, header: Header, meta: dict[str, Any]) -> None:
        role, session = str(meta.get("role")), str(meta.get("session"))
        if role not in ("coordinator", "worker"):
            raise WireError(f"unknown role {role!r}")
        if role == "coordinator":
            if session != self.session:
                for other in list(self._clients.values()):
                    if other is not client:
                        self._forget(other)  # they work for the coordinator before
                self.begin_session(session, meta.get("snapshots"))
            self._heard = time.monotonic()
        elif not self.session:
            raise UnavailableError(f"{self._name} has not heard from a coordinator yet.")
        elif session != self.session:
            raise CancelledError(f"{self._name} works for another coordinator now.")
        client.role, client.name = role, str(meta.get("task"))[:200]
        if role == "worker":
            self._forget_earlier(client)
        body = wire.pack_json(
            {
                "incarnation": self.incarnation, "task": self._name, "host": wire.boot_id(),
                "restored": self.restored, "empty": not self.table.variables,
            }
        )  # fmt: skip
        self._send(identity, [wire.message(Header(Kind.OK, header.request, meta_bytes=len(body)), body)])

    def _forget_earlier(self, client: Client) -> None:
        """A worker that was started again: the buffers and shared memory of its earlier process are not needed."""
        for other in list(self._clients.values()):
            if other is not client and other.role == "worker" and other.name == client.name:
                self._forget(other)

    def _batch(self, identity: bytes, client: Client, header: Header, meta: memoryview, parts: list[bytes]) -> None:
        operations = wire.unpack_operations(meta)
        self.table.check(header, operations)
        if header.flags & wire.FLAG_SHARED:
            if client.segment is None or header.data_bytes > client.segment.half:
                raise WireError("the data is said to be in shared memory, but there is no segment of that size")
            data = client.segment.request(header.data_bytes)
            alone = not self._others or len(operations) != 1 or rate_of(self.table, operations[0]) is None
            if not alone:
                self._together[client] = Write(header, operations[0], data)
                return
            self._execute(identity, client, header, operations, data)
        elif header.flags & wire.FLAG_INLINE:
            if len(parts) != 2 or len(parts[1]) != header.data_bytes:
                raise WireError(f"{header.data_bytes} bytes were announced")
            data = torch.frombuffer(bytearray(parts[1]), dtype=torch.uint8)
            self._execute(identity, client, header, operations, data)
        elif header.data_bytes == 0:
            self._execute(identity, client, header, operations, torch.empty(0, dtype=torch.uint8))
        else:
            if self._through is not None and not self._through.carries:
                raise WireError("tensors do not come through the door")
            client.room(header.data_bytes)
            client.header, client.operations, client.taken = header, operations, 0

    def _take_chunk(self, identity: bytes, client: Client) -> None:
        header = client.header
        assert header is not None
        left = header.data_bytes - client.taken
        view = wire.tensor_bytes(client.buffer)
        size = self._socket.recv_into(view[client.taken : client.taken + min(left, CHUNK)])
        if size > left or self._socket.getsockopt(zmq_link.RCVMORE):
            while self._socket.getsockopt(zmq_link.RCVMORE):
                self._socket.recv()
            client.header, client.refused = None, True
            self._refuse(identity, header.request, WireError(f"{left} more bytes were announced"))
            return
        client.taken += size
        if client.taken == header.data_bytes:
            self._execute_taken(client)

    def _execute_taken(self, client: Client) -> None:
        """Carries out a batch whose bytes have come in pieces."""
        header, client.header = client.header, None
        assert header is not None
        try:
            # Meanwhile the closure may have been started elsewhere.
            self.table.check(header, client.operations)
            self._execute(client.identity, client, header, client.operations, client.room(header.data_bytes))
        except Exception as error:
            self._refuse(client.identity, header.request, error)

    def _execute(
        self, identity: bytes, client: Client, header: Header, operations: list[wire.Operation], data: torch.Tensor
    ) -> None:
        self._answer(identity, client, header, operations, data, self.table.execute(header, operations, data))

    def _answer(
        self,
        identity: bytes,
        client: Client,
        header: Header,
        operations: list[wire.Operation],
        data: torch.Tensor,
        answer: Answer,
    ) -> None:
        if self.keeper is not None:
            self.keeper.note_batch(header, operations, answer.operations, data)
        meta = wire.pack_operations(answer.operations)
        total = sum(wire.padded(t.numel() * t.element_size()) for t in answer.tensors)
        segment = client.segment if header.flags & wire.FLAG_SHARED else None
        if total == 0:
            self._send(identity, [wire.message(Header(Kind.OK, header.request, meta_bytes=len(meta)), meta)])
        elif segment is not None and wire.INLINE < total <= segment.half:
            _pack(answer, segment.answer(total))
            reply = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total, flags=wire.FLAG_SHARED)
            self._send(identity, [wire.message(reply, meta)])
        elif total <= wire.INLINE:
            flat = torch.empty(total, dtype=torch.uint8)
            _pack(answer, flat)
            reply = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total, flags=wire.FLAG_INLINE)
            self._send(identity, [wire.message(reply, meta), wire.tensor_bytes(flat)])
        elif self._through is not None and self._through.carries:
            reply = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total)
            self._send(identity, [wire.message(reply, meta), *streams.pieces(answer.tensors)])
        elif self._through is not None:
            raise InvalidArgumentError(f"an answer of {total} bytes does not fit into the shared memory of this client")
        else:
            self._stream(identity, header, meta, answer, total)

    def _stream(self, identity: bytes, header: Header, meta: bytes, answer: Answer, total: int) -> None:
        reply = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total)
        if not self._send(identity, [wire.message(reply, meta)]):
            return
        for chunk in streams.stream(answer.tensors):
            try:
                self._socket.send(identity, zmq_link.SNDMORE)
                self._socket.send(chunk)
            except zmq_link.ZMQError:
                if (client := self._clients.get(identity)) is not None:
                    self._forget(client)
                return


def _expects_data(visitor: Visitor) -> bool:
    """Whether the next bytes of a connection belong to tensors."""
    client = visitor.client
    return visitor.carries and client is not None and (client.header is not None or client.skip > 0)


def _pack(answer: Answer, flat: torch.Tensor) -> None:
    """Lays the tensors of an answer out one after another."""
    offset = 0
    for tensor in answer.tensors:
        nbytes = tensor.numel() * tensor.element_size()
        flat[offset : offset + nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += wire.padded(nbytes)
