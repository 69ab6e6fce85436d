"""The client's end of the link to one parameter server: requests, posted writes, answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.parameter_server.client.connection import Connection
from tfstyle_dist.parameter_server.protocol import byte_streams, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_INLINE,
    HEADER_SIZE,
    INLINE,
    Header,
    Kind,
    pack_json,
    unpack_error,
)
from tfstyle_dist.parameter_server.protocol.operations import (
    Operation,
    has_steps,
    pack_operations,
    padded,
    tensor_bytes,
    unpack_operations,
)
from tfstyle_dist.parameter_server.protocol.work import NO_WORK, Work
from tfstyle_dist.parameter_server.transports.transport import Transport
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader
from tfstyle_dist.parameter_server.transports.zeromq import ZeroMQTransport

_MOST_POSTED = 256
_GATHERED = 1 << 20
"""Writes are sent together until they have so many bytes."""
_MOST_GATHERED = 1024
Taker = Callable[[list[Operation]], list[torch.Tensor]]


@dataclass(slots=True)
class _Waiting:
    number: int
    take: Taker | None  # None: a posted write, whose answer nobody waits for
    operations: int


class ServerLink(Connection):
    """Requests to one server; calls from several threads take turns. The arguments are those of ``Connection``."""

    def __init__(
        self,
        context: zeromq_sockets.Context,
        address: str,
        name: str,
        handshake: dict[str, Any],
        timeout: timedelta | None,
    ) -> None:
        super().__init__(context, address, name, handshake, timeout)
        self._number = 0
        self._waiting: deque[_Waiting] = deque()
        self._posted_error: Exception | None = None
        self._gathered: list[Operation] = []
        self._gathered_for, self._gathered_bytes = NO_WORK, 0
        self._room = torch.empty(0, dtype=torch.uint8)
        self._receiver: ThreadPoolExecutor | None = None
        self._room_bytes = memoryview(b"")

    def reconnect(self) -> bool:
        """Lets a server that was lost come back: what was not answered is made again by whoever made it."""
        if reconnects := super().reconnect():
            self._posted_error = None
        return reconnects

    def _abort(self, why: str) -> None:
        """Writes that were not answered are lost, or perhaps not: ``finish`` says so."""
        writes = len(self._gathered) + sum(w.take is None for w in self._waiting)
        if writes and self._posted_error is None:
            self._posted_error = UnavailableError(f"{why} {writes} requests with writes had not been answered.")
        self._waiting.clear()
        self._gathered, self._gathered_bytes = [], 0

    def _drop(self, linger_ms: int = 0) -> None:
        super()._drop(linger_ms)
        if self._receiver is not None:
            self._receiver.shutdown(wait=False)
            self._receiver = None

    # ---- requests ---------------------------------------------------------------------------------------------

    def call(self, meta: dict[str, Any], parts: Sequence[Any] = ()) -> dict[str, Any]:
        """Calls a method of the server and waits for its answer."""
        with self._lock:
            self.connect()
            self.flush()
            sizes, frames = byte_streams.split(parts)
            body = pack_json({**meta, "sizes": sizes})
            self._drain()
            return self._exchange(Header(Kind.CALL, 0, meta_bytes=len(body)), body, frames)

    def post(self, work: Work, operations: Sequence[Operation], tensors: Sequence[torch.Tensor]) -> None:
        """Sends writes whose answers ``finish`` waits for; small ones wait a little and go together.

        Args:
            work: the function at work.
            operations: the table; their ``nbytes`` and ``rows`` describe ``tensors``.
            tensors: row numbers and values in the order of the operations, contiguous, on the CPU; they may change
                afterwards.
        """
        with self._lock:
            self.connect()  # a first connection that breaks while it is made would take what was gathered with it
            total = sum(padded(t.nbytes) for t in tensors)
            large = total >= _GATHERED // 2
            full = self._gathered_bytes + total > _GATHERED or len(self._gathered) + len(operations) > _MOST_GATHERED
            if large or full or work != self._gathered_for or (has_steps(operations) and has_steps(self._gathered)):
                self.flush()  # in order; and the server would make one step of two
            if large:
                self.batch(work, operations, tensors, None)
                return
            if self._room.numel() == 0:
                self._room = torch.empty(_GATHERED, dtype=torch.uint8)
                self._room_bytes = tensor_bytes(self._room)
            offset = self._gathered_bytes
            for tensor in tensors:
                view = tensor_bytes(tensor)
                self._room_bytes[offset : offset + len(view)] = view
                offset += padded(len(view))
            self._gathered.extend(operations)
            self._gathered_for, self._gathered_bytes = work, offset

    def flush(self) -> None:
        """Sends the writes that were gathered; ``finish`` raises what goes wrong."""
        with self._lock:
            if self._gathered:
                operations, total = self._gathered, self._gathered_bytes
                self._gathered, self._gathered_bytes = [], 0
                try:
                    self.batch(self._gathered_for, operations, [self._room[:total]], None)
                except Exception as error:
                    self._posted_error = self._posted_error or error

    def batch(
        self,
        work: Work,
        operations: Sequence[Operation],
        tensors: Sequence[torch.Tensor],
        take: Taker | None,
        answer_bytes: int = 0,
    ) -> None:
        """Sends a batch.

        Args:
            work: the function at work.
            operations: the table; their ``nbytes`` and ``rows`` describe ``tensors``.
            tensors: row numbers and values in the order of the operations, contiguous, on the CPU.
            take: called with the answer's table by ``finish``; gives the flat byte tensors that the answer's bytes
                go into. ``None`` posts a write.
            answer_bytes: how many bytes the answer may bring.
        """
        with self._lock:
            self.connect()
            self.flush()
            total = sum(padded(t.nbytes) for t in tensors)
            transport = self._ready_transport(total, answer_bytes)
            if take is None and len(self._waiting) >= _MOST_POSTED:
                self.finish()
            self._number += 1
            meta = pack_operations(operations)
            flags = FLAG_INLINE if 0 < total <= INLINE else 0
            numbers = self._number, work.closure, work.low_water, work.attempt
            header = Header(Kind.BATCH, *numbers, len(meta), total, flags)
            try:
                transport.send(header, meta, tensors, answer_bytes)
            except (ConnectionError, TimeoutError) as error:
                raise self.reported(error) from None
            self._waiting.append(_Waiting(self._number, take, len(operations)))

    def _ready_transport(self, request_bytes: int, answer_bytes: int) -> Transport:
        """The transport, when it can take a request."""
        transport = self._transport()
        if transport.needs_all_answers(request_bytes, answer_bytes, self._data_is_due):
            self._drain()
        if transport.most_unanswered is not None:
            while sum(w.operations for w in self._waiting) > transport.most_unanswered:
                self._receive()
        if not transport.make_room(max(request_bytes, answer_bytes)):
            self.use(ZeroMQTransport(self))
        return self._transport()

    def _data_is_due(self) -> bool:
        """Whether an answer will bring tensors."""
        return any(waiting.take is not None for waiting in self._waiting)

    def _transport(self) -> Transport:
        if self.transport is None:
            raise UnavailableError(self._lost or f"{self.name} at {self.address} is not connected.")
        return self.transport

    def finish(self) -> None:
        """Waits for the answers of all that was sent.

        Raises:
            UnavailableError: the server was lost.
            DeadlineExceededError: it does not answer in time.
            Exception: the first error that the server reported.
        """
        with self._lock:
            self.flush()
            self._drain()
            error, self._posted_error = self._posted_error, None
            if error is not None:
                raise error

    # ---- answers ----------------------------------------------------------------------------------------------

    def receive_in_background(self) -> None:
        """Lets answers come while this thread goes on, where they must be read; ``finish`` raises their errors."""
        if self.transport is None or not self.transport.must_be_read:
            return
        if self._receiver is None:
            self._receiver = ThreadPoolExecutor(1, "tfstyle-ps-ahead")
        self._receiver.submit(self._collect)

    def _collect(self) -> None:
        with self._lock:
            try:
                self._drain()
            except Exception as error:
                self._posted_error = self._posted_error or error

    def _receive(self) -> None:
        """Takes the next answer: they come in the order of the requests."""
        waiting, transport = self._waiting.popleft(), self._transport()
        try:
            self._take_answer(waiting, transport, transport.receive())
        except (ConnectionError, TimeoutError) as error:
            raise self.reported(error) from None

    def _take_answer(self, waiting: _Waiting, transport: Transport, message: list[bytes]) -> None:
        header = Header.unpack(message[0])
        body = memoryview(message[0])[HEADER_SIZE:]
        if header.kind is Kind.ERROR:
            self._posted_error = self._posted_error or unpack_error(body, self.name)
        elif header.request != waiting.number:
            raise self.lose(f"answered request {header.request} instead of {waiting.number}")
        elif waiting.take is not None:
            filler = byte_streams.Filler(waiting.take(unpack_operations(body)))
            if filler.total != header.data_bytes:
                raise self.lose(f"sent {header.data_bytes} bytes for {filler.total}")
            if header.data_bytes:
                transport.fill(header, message, filler)
        elif header.data_bytes:
            raise self.lose(f"sent {header.data_bytes} bytes in answer to a write")

    def _drain(self) -> None:
        """Takes all answers that are on their way; ``finish`` raises their errors."""
        while self._waiting:
            self._receive()

    # ---- shared memory ----------------------------------------------------------------------------------------

    def values(self, variables: Iterable[int]) -> ValueReader | None:
        """The variables that this process can read without asking; what it has written is among them.

        Args:
            variables: those that are wanted.

        Raises:
            UnavailableError: the server is gone.
            Exception: the first error that the server reported for what was sent before.
        """
        with self._lock:
            self.connect()
            if not self.is_near:
                return None
            if self._gathered or self._waiting:
                self.finish()
            transport = self._transport()
            if transport.has_ended():
                raise self.gone()
            return transport.values(variables)

    def sweep(self) -> None:
        """Gives back values that are not used in place any more."""
        with self._lock:
            if self.transport is not None:
                self.transport.sweep()
