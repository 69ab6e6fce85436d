"""TCP at the server: each connection has a thread at the server, so that bytes of several come and go at one time.

A thread waits for bytes without the server's lock and works on the table with it; large updates are made by one thread
for all, so that torch has one team of threads. What it sends it sends without the lock too, straight from the
variables: they are leased meanwhile, and a write that comes goes into other memory.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tfstyle_dist.core import env
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops.threads import work_alone
from tfstyle_dist.parameter_server.protocol import byte_streams, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.handshake import TOKEN_BYTES, TOKEN_SECONDS, WELCOME
from tfstyle_dist.parameter_server.protocol.header import CHUNK, ProtocolError
from tfstyle_dist.parameter_server.protocol.operations import Answer, Lease
from tfstyle_dist.parameter_server.transports.client_session import ClientSession
from tfstyle_dist.parameter_server.transports.listening_socket import ListeningSocket
from tfstyle_dist.parameter_server.transports.stream_socket import JOINED, Frames, tune
from tfstyle_dist.parameter_server.transports.transport import Host

_PIECE = 1 << 14
_LARGE = 1 << 20
_END_SECONDS = 5.0


class TcpConnection:
    """The server's end of one connection, and its thread.

    Args:
        connection: a new one.
        listener: where it came in.
    """

    batches_only = True

    def __init__(self, connection: socket.socket, listener: TcpListener) -> None:
        self._connection, self._listener, self._frames = connection, listener, Frames()
        self._host = listener.host
        self.is_trusted = not self._host.has_keys  # else its bytes are the only ones that are not encrypted
        self._outbox: list[tuple[list[Any], list[Lease]]] = []
        self.thread = threading.Thread(target=self._run, name="tfstyle-ps-tcp", daemon=True)

    def detach(self) -> None:
        """Its end is always the client's."""

    def end(self) -> None:
        """Ends the connection; its thread notices."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    # ---- answers, with the lock -------------------------------------------------------------------------------

    def send(self, parts: list[Any]) -> bool:
        """Sends a message after the lock is free; until then its parts must not change."""
        self._outbox.append((parts, []))
        return True

    def stream(self, head: bytes, answer: Answer) -> bool:
        """Sends a message and tensors, as they are now, after the lock is free."""
        leases, copied = [], set()
        for index, stored in enumerate(answer.sources):
            lease = None if stored is None else stored.lease()
            if lease is not None:
                leases.append(lease)
            elif stored is not None:
                copied.add(index)
        try:
            self._outbox.append(([head, *byte_streams.views(answer.tensors, copied)], leases))
        except BaseException:
            _release(leases)
            raise
        return True

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        work_alone()
        host, client = self._host, None
        try:
            client = self._identify()
            while client is not None and not client.refused:
                parts = self._message()
                with host.lock:
                    host.take_message(client, parts, self)
                self._send_all()
                self._take_tensors(client)
            while client is not None:
                self._receive(CHUNK)  # nothing sensible can follow; the client is told, and goes
        except OSError:
            pass  # it is gone
        except ProtocolError as error:
            get_logger().warning("%s closes a connection: %s", self._host.name, error)
        finally:
            with host.lock:
                for _, leases in self._outbox:
                    _release(leases)
                if client is not None:
                    host.forget(client)
                self._listener.connections.discard(self)
            self._connection.close()

    def _identify(self) -> ClientSession | None:
        """The client that shows its token; strangers get no thread for longer, and no more memory."""
        end, room = time.monotonic() + TOKEN_SECONDS, TOKEN_BYTES
        while (parts := self._frames.take()) is None:
            left = end - time.monotonic()
            if room == 0 or left <= 0:
                raise ProtocolError("whoever connected did not show a token")
            self._connection.settimeout(left)
            piece = self._receive(room)
            room -= len(piece)
            self._frames.feed(piece)
        self._connection.settimeout(None)
        message = parts[0]
        with self._host.lock:
            client: ClientSession | None = self._host.tokens.take(message)
            if client is None:
                return None
            self._connection.sendall(WELCOME)  # a new connection has room for it
            client.connection = client.data_channel = self
        return client

    def _message(self) -> list[bytes]:
        """The next message."""
        while (parts := self._frames.take()) is None:
            self._frames.feed(self._receive(_PIECE))
        return parts

    def _receive(self, most: int) -> bytes:
        piece = self._connection.recv(most)
        if not piece:
            raise ConnectionResetError
        return piece

    def _take_tensors(self, client: ClientSession) -> None:
        """Takes the bytes that follow a batch, and carries it out; those of a refused one are dropped."""
        while client.skip:
            room = memoryview(bytearray(min(client.skip, CHUNK)))
            self._fill(room)
            client.skip -= len(room)
        if client.header is not None:
            self._fill(client.view[: client.header.data_bytes])
            self._listener.execute_taken(client, self)
            self._send_all()

    def _fill(self, room: memoryview) -> None:
        room = room[self._frames.take_into(room) :]
        while room:
            count = self._connection.recv_into(room, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError
            room = room[count:]

    def _send_all(self) -> None:
        while self._outbox:
            parts, leases = self._outbox[0]
            joined = len(parts) > 1 and sum(map(len, parts)) <= JOINED
            for part in [b"".join(parts)] if joined else parts:
                self._connection.sendall(part)
            if leases:
                with self._host.lock:
                    _release(leases)
            del self._outbox[0]


class TcpListener:
    """Where clients of other hosts connect.

    Args:
        host: the server.

    Raises:
        PermissionError: TCP is switched off.
    """

    def __init__(self, host: Host) -> None:
        if not env.parameter_server_tcp(host.has_keys):
            raise PermissionError(f"{host.name} lets no tensors come by plain TCP (TFSTYLE_PS_TCP)")
        self.host = host
        self.connections: set[TcpConnection] = set()
        family = socket.AF_INET6 if ":" in host.interface else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(listening)
            listening.bind((host.interface, 0))
            self._listening = ListeningSocket(listening, host.name)
        except OSError:
            listening.close()
            raise
        self.number, self._port = self._listening.number, int(listening.getsockname()[1])
        self._helped: ThreadPoolExecutor | None = None
        if torch.get_num_threads() > 1:
            self._helped = ThreadPoolExecutor(1, "tfstyle-ps-table", torch.set_grad_enabled, (False,))
        host.poller.register(self.number, zeromq_sockets.POLLIN)

    def invite(self, client: ClientSession) -> dict[str, Any]:
        """The port, and a token."""
        return {"token": self.host.tokens.give(client), "port": self._port}

    def execute_taken(self, client: ClientSession, connection: TcpConnection) -> None:
        """Carries out a batch whose tensors have come; a large one in the thread that torch's other threads help."""
        assert client.header is not None
        if self._helped is None or client.header.data_bytes < _LARGE:
            self._execute(client, connection)
        else:
            self._helped.submit(self._execute, client, connection).result()

    def _execute(self, client: ClientSession, connection: TcpConnection) -> None:
        with self.host.lock:
            self.host.execute_taken(client, connection)

    def admit(self) -> None:
        """Takes a new connection; who it is it has to tell."""
        connection = self._listening.accept(len(self.connections))
        if connection is None:
            return
        connection.setblocking(True)
        tune(connection)
        admitted = TcpConnection(connection, self)
        try:
            admitted.thread.start()
        except RuntimeError as error:  # no more threads, or no memory for one; the client goes on by ZeroMQ
            count = len(self.connections)
            get_logger().warning("%s takes no more TCP connections than %d: %s", self.host.name, count, error)
            connection.close()
            return
        self.connections.add(admitted)

    def serve(self, number: int, event: int) -> None:
        """Nothing: each connection has a thread."""

    def tick(self) -> None:
        """Nothing: each connection has a thread."""

    def close(self) -> None:
        """Ends all; to be called without the server's lock."""
        self._listening.close()
        for connection in (left := list(self.connections)):
            connection.end()
        for connection in left:
            connection.thread.join(_END_SECONDS)
        if self._helped is not None:
            self._helped.shutdown()


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
