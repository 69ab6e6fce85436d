"""TCP connections of clients on other hosts: each has a thread, so that bytes of several come and go at one time.

A thread waits for bytes without the server's lock and works on the table with it; large updates are made by one thread
for all, so that torch has one team of threads. What it sends it sends without the lock too, straight from the
variables: they are lent meanwhile, and a write that comes goes into other memory.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops.threads import work_alone
from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import CHUNK, ProtocolError
from tfstyle_dist.parameter_server.server.owner_segments import Loan
from tfstyle_dist.parameter_server.server.sessions import Client
from tfstyle_dist.parameter_server.server.table import Answer
from tfstyle_dist.parameter_server.transports.frames import JOINED, Frames, tune
from tfstyle_dist.parameter_server.transports.listening_socket import Listener
from tfstyle_dist.parameter_server.transports.unix_listener import TOKEN_BYTES, TOKEN_SECONDS, WELCOME, Tokens

_PIECE = 1 << 14
_LARGE = 1 << 20
_END_SECONDS = 5.0


class Desk(Protocol):
    """What the server does with the messages of a connection, all with its lock held."""

    lock: threading.Lock

    def take_message(self, client: Client, parts: list[bytes], way: Any) -> None:
        """Works on a message."""

    def execute_taken(self, client: Client, way: Any) -> None:
        """Carries out a batch whose tensors have come."""

    def forget(self, client: Client) -> None:
        """A client is gone."""


class Carrier:
    """The server's end of one connection.

    Args:
        connection: a new one.
        port: that it came in at.
    """

    def __init__(self, connection: socket.socket, port: StreamPort) -> None:
        self._connection, self._port, self._frames = connection, port, Frames()
        self._outbox: list[tuple[list[Any], list[Loan]]] = []
        self.thread = threading.Thread(target=self._run, name="tfstyle-ps-tcp", daemon=True)

    def shut(self) -> None:
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
        loans, copied = [], set()
        for place, stored in enumerate(answer.sources):
            loan = None if stored is None else stored.lend()
            if loan is not None:
                loans.append(loan)
            elif stored is not None:
                copied.add(place)
        try:
            self._outbox.append(([head, *byte_streams.pieces(answer.tensors, copied)], loans))
        except BaseException:
            _give_back(loans)
            raise
        return True

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        work_alone()
        desk, client = self._port.desk, None
        try:
            client = self._identify()
            while client is not None and not client.refused:
                parts = self._message()
                with desk.lock:
                    desk.take_message(client, parts, self)
                self._send_all()
                self._take_tensors(client)
            while client is not None:
                self._receive(CHUNK)  # nothing sensible can follow; the client is told, and goes
        except OSError:
            pass  # it is gone
        except ProtocolError as error:
            get_logger().warning("%s closes a connection: %s", self._port.name, error)
        finally:
            with desk.lock:
                for _, loans in self._outbox:
                    _give_back(loans)
                if client is not None:
                    desk.forget(client)
                self._port.carriers.discard(self)
            self._connection.close()

    def _identify(self) -> Client | None:
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
        with self._port.desk.lock:
            client: Client | None = self._port.tokens.take(message)
            if client is None or client.has_entered:
                return None
            self._connection.sendall(WELCOME)  # a new connection has room for it
            client.carrier = self
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

    def _take_tensors(self, client: Client) -> None:
        """Takes the bytes that follow a batch, and carries it out; those of a refused one are dropped."""
        while client.skip:
            room = memoryview(bytearray(min(client.skip, CHUNK)))
            self._fill(room)
            client.skip -= len(room)
        if client.header is not None:
            self._fill(client.view[: client.header.data_bytes])
            self._port.execute_taken(client, self)
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
            parts, loans = self._outbox[0]
            joined = len(parts) > 1 and sum(map(len, parts)) <= JOINED
            for part in [b"".join(parts)] if joined else parts:
                self._connection.sendall(part)
            if loans:
                with self._port.desk.lock:
                    _give_back(loans)
            del self._outbox[0]


class StreamPort:
    """Where clients of other hosts connect.

    Args:
        host: the interface to listen at.
        name: of the server, for messages.
        tokens: of those who may come in.
        desk: the server.
    """

    def __init__(self, host: str, name: str, tokens: Tokens, desk: Desk) -> None:
        self.name, self.tokens, self.desk = name, tokens, desk
        self.carriers: set[Carrier] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            tune(listening)
            listening.bind((host, 0))
            self._listener = Listener(listening, name)
        except OSError:
            listening.close()
            raise
        self.number, self.port = self._listener.number, int(listening.getsockname()[1])
        self._helped: ThreadPoolExecutor | None = None
        if torch.get_num_threads() > 1:
            self._helped = ThreadPoolExecutor(1, "tfstyle-ps-table", torch.set_grad_enabled, (False,))

    def execute_taken(self, client: Client, way: Any) -> None:
        """Carries out a batch whose tensors have come; a large one in the thread that torch's other threads help."""
        assert client.header is not None
        if self._helped is None or client.header.data_bytes < _LARGE:
            self._execute(client, way)
        else:
            self._helped.submit(self._execute, client, way).result()

    def _execute(self, client: Client, way: Any) -> None:
        with self.desk.lock:
            self.desk.execute_taken(client, way)

    def admit(self) -> None:
        """Takes a new connection; who it is it has to tell."""
        connection = self._listener.accept(len(self.carriers))
        if connection is None:
            return
        connection.setblocking(True)
        tune(connection)
        carrier = Carrier(connection, self)
        try:
            carrier.thread.start()
        except RuntimeError as error:  # no more threads, or no memory for one; the client goes on by ZeroMQ
            get_logger().warning("%s takes no more TCP connections than %d: %s", self.name, len(self.carriers), error)
            connection.close()
            return
        self.carriers.add(carrier)

    def shut(self) -> None:
        """Ends all; to be called without the server's lock."""
        self._listener.close()
        for carrier in (left := list(self.carriers)):
            carrier.shut()
        for carrier in left:
            carrier.thread.join(_END_SECONDS)
        if self._helped is not None:
            self._helped.shutdown()


def _give_back(loans: list[Loan]) -> None:
    for loan in loans:
        loan.give_back()
