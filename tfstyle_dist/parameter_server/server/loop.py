"""The process of one parameter server: takes requests from its sockets and works on its table."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.addresses import bindable
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.handshake import Tokens
from tfstyle_dist.parameter_server.protocol.header import (
    CHUNK,
    FLAG_INLINE,
    FLAG_SHARED,
    HEADER_SIZE,
    Header,
    Kind,
    ProtocolError,
    pack_json,
    pack_message,
    unpack_json,
    unpack_numbers,
)
from tfstyle_dist.parameter_server.protocol.peer_loop import Wakeup
from tfstyle_dist.parameter_server.server.batches import refusal
from tfstyle_dist.parameter_server.server.calls import ServerState
from tfstyle_dist.parameter_server.server.sessions import Sessions
from tfstyle_dist.parameter_server.transports.available import LISTENERS
from tfstyle_dist.parameter_server.transports.client_session import Channel, ClientSession
from tfstyle_dist.parameter_server.transports.transport import Listener
from tfstyle_dist.parameter_server.transports.zeromq import ZeroMQChannel

MOST_CLIENTS = 4096


class ParameterServer:
    """Serves one table.

    One thread takes what comes by ZeroMQ and through listeners that poll with it; other listeners have threads of their
    own. Whoever works holds the lock.

    Args:
        context: sockets and keys.
        address: ``host:port`` to listen at.
        name: of the task, for messages, e.g. ``"/job:ps/task:0"``.
        grace_seconds: without a sign of life of the coordinator after which ``run`` gives up.
    """

    def __init__(self, context: zeromq_sockets.Context, address: str, name: str, grace_seconds: float) -> None:
        self.name, self._grace_seconds = name, grace_seconds
        self.interface = bindable(address.rpartition(":")[0]).strip("[]")
        self.has_keys = context.keys is not None
        self.lock = threading.Lock()
        self.tokens = Tokens()
        self.state = ServerState(name)
        self.sessions = Sessions(name, self.state, self.tokens)
        self._batches = self.sessions.batches
        self._ended = False
        self._socket = context.listen(address)
        self._wakeup = Wakeup()
        self.poller = zeromq_sockets.poller(self._socket, self._wakeup.file)
        self._listeners: dict[str, Listener] = {}
        self._admitting: dict[int, Listener] = {}  # the same by the descriptor that is polled

    # ---- life -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing a waiting thread must look after: ``run`` never sits in other people's code for long."""

    def end(self) -> None:
        """Makes ``run`` return; any thread may call it."""
        self._ended = True
        self._wakeup.set()

    def run(self) -> None:
        """Serves until the coordinator says goodbye.

        Raises:
            UnavailableError: a coordinator was there, and then was silent for too long.
        """
        torch.set_grad_enabled(False)  # of this thread
        try:
            while not self._ended:
                events = self.poller.poll(self._rest_ms())
                with self.lock:
                    self._turn(events)
        finally:
            with self.lock:
                for client in list(self.sessions.clients.values()):
                    self.forget(client)
            for listener in self._listeners.values():
                listener.close()
            self._socket.close(0)
            self._wakeup.close()
            self.state.stop_keeping(forget=self._ended)
            self.state.table.shared.close()

    def _turn(self, events: list[tuple[Any, int]]) -> None:
        """Takes what has come, and does what is due."""
        connections = []
        for entry, event in events:
            if entry == self._socket:
                self._take()
            elif entry == self._wakeup.file:
                self._wakeup.clear()
            elif entry in self._admitting:
                self._admitting[entry].admit()
            else:
                connections.append((entry, event))
        self._batches.others_wait = len(connections) > 1
        for entry, event in connections:
            for listener in self._listeners.values():
                listener.serve(entry, event)
        self._batches.others_wait = False
        for listener in self._listeners.values():
            listener.tick()
        self._batches.write_coalesced()
        if self.state.jobs.busy:
            self.state.jobs.tick()
        if self.state.keeper is not None:
            self.state.keeper.tick()
        if self.sessions.seconds_of_silence() > self._grace_seconds:
            raise zeromq_sockets.silence(self.name, self._grace_seconds)

    def _rest_ms(self) -> int:
        """How long nothing needs to be done unless a message comes."""
        if self.state.jobs.busy:
            return 2
        return 500 if self.state.keeper is None else self.state.keeper.rest_ms(500)

    def _take(self) -> None:
        """Takes the messages that are there, but not for ever: the coordinator's silence must be noticed."""
        for _ in range(256):
            try:
                identity = self._socket.recv(zeromq_sockets.DONTWAIT)
            except zeromq_sockets.Again:
                return
            client = self.sessions.clients.get(identity)
            if client is not None and client.header is not None:
                self._take_chunk(client)
                continue
            parts = self._socket.recv_multipart()
            if client is None:
                self._take_first(ClientSession(identity, ZeroMQChannel(self._socket, identity)), parts)
            elif client.skip:
                client.skip = max(client.skip - len(parts[0]), 0)
            elif not client.refused:
                self.take_message(client, parts, client.channel)

    def _take_first(self, client: ClientSession, parts: list[bytes]) -> None:
        """Takes the first message of a client, which is one of this server's only if it introduces itself well."""
        if len(self.sessions.clients) >= MOST_CLIENTS:
            full = UnavailableError(f"{self.name} takes no more clients: it has {MOST_CLIENTS}.")
            get_logger().warning("%s", full)
            self._batches.send(client, client.channel, [refusal(0, full)])
            return
        self.take_message(client, parts, client.channel)
        if client.role:
            self.sessions.clients[client.identity] = client

    def _take_chunk(self, client: ClientSession) -> None:
        """Takes the next bytes of a batch by ZeroMQ."""
        header = client.header
        assert header is not None
        left = header.data_bytes - client.taken
        size = self._socket.recv_into(client.view[client.taken : client.taken + min(left, CHUNK)])
        if size > left or self._socket.getsockopt(zeromq_sockets.RCVMORE):
            while self._socket.getsockopt(zeromq_sockets.RCVMORE):
                self._socket.recv()
            client.header, client.refused = None, True
            error = ProtocolError(f"{left} more bytes were announced")
            self._batches.send(client, client.channel, [refusal(header.request, error)])
            return
        client.taken += size
        if client.taken == header.data_bytes:
            self.execute_taken(client, client.channel)

    def forget(self, client: ClientSession) -> None:
        """A client is gone."""
        self.sessions.forget(client)

    # ---- messages ---------------------------------------------------------------------------------------------

    def take_message(self, client: ClientSession, parts: list[bytes], channel: Channel) -> None:
        """Works on a message.

        Args:
            client: who sent it.
            parts: of it.
            channel: that it came; the answer takes the same.
        """
        if self._batches.is_waiting(client):
            self._batches.write_coalesced()
        header = None
        try:
            header = Header.unpack(parts[0])
            self._handle(client, header, parts, channel)
        except ProtocolError as error:
            # Nothing sensible can follow on a connection that breaks the protocol.
            get_logger().warning("%s refuses a message of %s: %s", self.name, client.name, error)
            client.refused = True
            client.drop_buffer()
            self._batches.send(client, channel, [refusal(0 if header is None else header.request, error)])
        except Exception as error:
            if header is not None and header.kind is Kind.BATCH and not header.flags & FLAG_INLINE:
                client.skip = 0 if header.flags & FLAG_SHARED else header.data_bytes
            self._batches.send(client, channel, [refusal(0 if header is None else header.request, error)])

    def execute_taken(self, client: ClientSession, channel: Channel) -> None:
        """Carries out a batch whose bytes have come in pieces."""
        self._batches.execute_taken(client, channel)

    def _handle(self, client: ClientSession, header: Header, parts: list[bytes], channel: Channel) -> None:
        meta = memoryview(parts[0])[HEADER_SIZE:]
        if header.kind is Kind.HANDSHAKE:
            if channel is not client.channel:
                raise ProtocolError("a handshake comes by ZeroMQ")
            self._reply(client, header, self.sessions.introduce(client, unpack_json(meta)), channel)
            return
        if not client.role:
            raise ProtocolError("the first message must be a handshake")
        if client.role == "coordinator":
            self.sessions.note_sign_of_life()
        if header.kind is Kind.BATCH:
            self._batches.take(client, header, meta, parts, channel)
        elif channel.batches_only:
            raise ProtocolError("tensors alone come this way")
        elif header.kind is Kind.CALL:
            asked = unpack_json(meta)
            listen = asked.get("method") == "listen"
            answer = self._invite(client, asked) if listen else self._call(client, asked, parts[1:])
            self._reply(client, header, answer, channel)
        elif header.kind is Kind.GOODBYE:
            if client.role == "coordinator":
                self.end()
            self.forget(client)
        elif header.kind is Kind.ALIVE:
            if client.role == "coordinator" and meta:
                below, *unfinished = unpack_numbers(meta)
                if len(unfinished) % 2:
                    raise ProtocolError("a range of functions has no end")
                self.state.table.writes.settle(header.low_water, below, unfinished)
        else:
            raise ProtocolError(f"a server does not take messages of kind {header.kind.name}")

    def _reply(self, client: ClientSession, header: Header, answer: dict[str, Any], channel: Channel) -> None:
        body = pack_json(answer)
        head = Header(Kind.OK, header.request, meta_bytes=len(body))
        self._batches.send(client, channel, [pack_message(head, body)])

    def _call(self, client: ClientSession, asked: dict[str, Any], frames: list[bytes]) -> dict[str, Any]:
        if asked.get("method") == "statistics":
            return {**self.state.statistics(), "clients": len(self.sessions.clients)}
        return self.state.call(client, asked, frames)

    def _invite(self, client: ClientSession, asked: dict[str, Any]) -> dict[str, Any]:
        """Where a client finds a transport's socket, and the token that it has to show there."""
        kind = str(asked.get("transport"))
        if kind not in LISTENERS:
            raise ProtocolError(f"unknown transport {kind!r}")
        try:
            if kind not in self._listeners:
                made = self._listeners[kind] = LISTENERS[kind](self)
                self._admitting[made.number] = made
        except PermissionError:
            raise
        except OSError as error:  # e.g. no file left: the client goes on by ZeroMQ
            raise PermissionError(f"{self.name} can open no socket for it: {error}") from error
        return self._listeners[kind].invite(client)
