"""The client's end of the link to one parameter server: requests, posted writes, deadlines, liveness."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.core import env
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server import shared_values, wire, zmq_link
from tfstyle_dist.parameter_server.segment import Segment
from tfstyle_dist.parameter_server.shared_values import ValuesReader
from tfstyle_dist.parameter_server.wire import Header, Kind, Operation

_MOST_POSTED = 256
_GATHERED = 1 << 20
"""Writes are sent together until they have so many bytes."""
_MOST_GATHERED = 1024
_ADVICE = (
    ", and its variables with it. Start the program again from a checkpoint; under "
    "ParameterServerStrategy(..., snapshot_folder=FOLDER) a server that is started again goes on from its snapshots"
)
Taker = Callable[[list[Operation]], list[torch.Tensor]]


@dataclass(frozen=True)
class Work:
    """The scheduled function on whose behalf requests are made.

    Attributes:
        closure: its number; 0 outside of functions.
        attempt: how often it was started.
        low_water: all functions with smaller numbers are finished.
    """

    closure: int = 0
    attempt: int = 0
    low_water: int = 0


NO_WORK = Work()


@dataclass(slots=True)
class _Waiting:
    number: int
    take: Taker | None  # None: a posted write, whose answer nobody waits for


class ServerLink:
    """A connection to one server; calls from several threads take turns.

    Args:
        context: sockets and keys.
        address: of the server.
        name: of the server, for messages.
        hello: role, task and session of this process.
        timeout: limit of each wait; ``None``: none.
    """

    def __init__(
        self,
        context: zmq_link.Context,
        address: str,
        name: str,
        hello: dict[str, Any],
        timeout: timedelta | None,
    ) -> None:
        self._context, self.address, self.name, self._hello, self._timeout = context, address, name, hello, timeout
        self._lock = threading.RLock()
        self._number = 0
        self._waiting: deque[_Waiting] = deque()
        self._posted_error: Exception | None = None
        self._lost: str | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._up = False
        self._poller: Any = None
        self._segment: Segment | None = None
        self._shared = False
        self._gathered: list[Operation] = []
        self._gathered_for, self._gathered_bytes = NO_WORK, 0
        self._room = torch.empty(0, dtype=torch.uint8)
        self._values: ValuesReader | None = None
        self.lane = "none"
        snapshots = hello.get("snapshots")
        self._returns: str | None = None if snapshots is None else str(snapshots["folder"])
        self._incarnation = ""

    # ---- life -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connects and introduces this process; nothing when that was done before.

        Raises:
            DeadlineExceededError: the server does not answer in time.
            UnavailableError: it refuses the keys, or was lost before.
        """
        with self._lock:
            if self._lost is not None:
                raise UnavailableError(self._lost)
            if self._socket is not None:
                return
            answer = self._introduce()
            self._shared = env.shared_memory() and bool(answer.get("host")) and answer["host"] == wire.boot_id()
            self.lane = "shared memory" if self._shared else "ZeroMQ"
            get_logger().info("%s at %s: tensors travel by %s", self.name, self.address, self.lane)

    def _introduce(self) -> dict[str, Any]:
        """Connects and says hello; with snapshots also to a server that is just being started again."""
        meta, deadline = wire.pack_json(self._hello), Deadline(self._timeout)
        while True:
            self._up = False
            self._socket, self._monitor = self._context.connect(self.address, b"c" + uuid.uuid4().bytes)
            self._poller = zmq_link.poller(self._socket, self._monitor)
            try:
                answer = self._exchange(Header(Kind.HELLO, 0, meta_bytes=len(meta)), meta, [])
                break
            except Exception as error:
                if self._socket is not None:
                    self._drop()
                starting = isinstance(error, UnavailableError) and self._lost is None  # it has no coordinator yet
                again = starting or (bool(self._incarnation) and isinstance(error, UnavailableError | TimeoutError))
                if self._returns is None or not again:
                    raise
                self._lost = None
                if deadline.passed():
                    raise UnavailableError(
                        f"{self.name} at {self.address} was lost and did not come back within {deadline}. Start it "
                        f"again at the same address: it goes on from what it wrote to {self._returns}."
                    ) from error
                time.sleep(0.05)
        before, self._incarnation = self._incarnation, str(answer["incarnation"])
        if before not in ("", self._incarnation) and not answer.get("restored"):
            folder, self._returns = self._returns, None
            raise self._broken(f"was started again and found nothing of this program in {folder}")
        return answer

    def forgive(self) -> bool:
        """Lets a server that was lost come back, if it can; whether it was lost."""
        if self._lost is None or self._returns is None:
            return False
        self._lost = None
        return True

    @property
    def may_return(self) -> bool:
        """Whether the server was lost and can come back."""
        return self._lost is not None and self._returns is not None

    def close(self, goodbye: bool = True) -> None:
        """Takes leave and closes the connection."""
        with self._lock:
            if self._socket is None:
                return
            if goodbye and self._lost is None:
                self._socket.linger = 1000
                self._socket.send(wire.message(Header(Kind.GOODBYE, 0), b""))
            self._drop()

    def _drop(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._socket = self._monitor = self._poller = self._values = None
        self._gathered, self._gathered_bytes = [], 0
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    # ---- requests ---------------------------------------------------------------------------------------------

    def call(self, meta: dict[str, Any], parts: Sequence[Any] = ()) -> dict[str, Any]:
        """Calls a method of the server and waits for its answer."""
        with self._lock:
            self.connect()
            self.flush()
            sizes, frames = wire.split(parts)
            body = wire.pack_json({**meta, "sizes": sizes})
            return self._exchange(Header(Kind.CALL, 0, meta_bytes=len(body)), body, frames)

    def alive(self) -> None:
        """Tells the server that this process lives."""
        with self._lock:
            if self._socket is not None and self._lost is None:
                self._socket.send(wire.message(Header(Kind.ALIVE, 0), b""))

    def post(self, work: Work, operations: Sequence[Operation], tensors: Sequence[torch.Tensor]) -> None:
        """Sends writes whose answers ``finish`` waits for; small ones wait a little and go together.

        Args:
            work: the function at work.
            operations: the table; their ``nbytes`` and ``rows`` describe ``tensors``.
            tensors: row numbers and values in the order of the operations, contiguous, on the CPU; they may change
                afterwards.
        """
        with self._lock:
            total = sum(wire.padded(t.numel() * t.element_size()) for t in tensors)
            if self._gathered and (
                work != self._gathered_for
                or self._gathered_bytes + total > _GATHERED
                or len(self._gathered) + len(operations) > _MOST_GATHERED
            ):
                self.flush()
            if total >= _GATHERED // 2:
                self.batch(work, operations, tensors, None)
                return
            if self._room.numel() == 0:
                self._room = torch.empty(_GATHERED, dtype=torch.uint8)
            views, offset = [], self._gathered_bytes
            for tensor in tensors:
                views.append((wire.tensor_bytes(tensor), offset))
                offset += wire.padded(len(views[-1][0]))
            wire.pack_views(views, self._room, offset)
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
            sizes = [t.numel() * t.element_size() for t in tensors]
            total = sum(wire.padded(n) for n in sizes)
            shared = self._use_segment(total, answer_bytes)
            if take is None and len(self._waiting) >= _MOST_POSTED:
                self.finish()
            self._number += 1
            meta = wire.pack_operations(operations)
            flags = wire.FLAG_SHARED if shared else wire.FLAG_INLINE if 0 < total <= wire.INLINE else 0
            header = Header(
                Kind.BATCH, self._number, work.closure, work.low_water, work.attempt, len(meta), total, flags
            )
            head = wire.message(header, meta)
            if shared:
                assert self._segment is not None
                _pack(tensors, sizes, self._segment.request(total))
                self._socket.send(head)
            elif total == 0:
                self._socket.send(head)
            elif flags:
                flat = torch.empty(total, dtype=torch.uint8)
                _pack(tensors, sizes, flat)
                self._socket.send_multipart([head, wire.tensor_bytes(flat)])
            else:
                self._socket.send(head)
                for chunk in wire.stream(tensors):
                    self._socket.send(chunk)
            self._waiting.append(_Waiting(self._number, take))

    def finish(self) -> None:
        """Waits for the answers of all that was sent.

        Raises:
            UnavailableError: the server was lost.
            DeadlineExceededError: it does not answer in time.
            Exception: the first error that the server reported.
        """
        with self._lock:
            self.flush()
            while self._waiting:
                self._receive()
            error, self._posted_error = self._posted_error, None
            if error is not None:
                raise error

    # ---- waiting ----------------------------------------------------------------------------------------------

    def _exchange(self, header: Header, meta: bytes, frames: Sequence[Any]) -> dict[str, Any]:
        while self._waiting:
            self._receive()
        self._socket.send_multipart([wire.message(header, meta), *frames])
        message = self._next_message()
        answer = Header.unpack(message[0])
        body = memoryview(message[0])[wire.HEADER_SIZE :]
        if answer.kind is Kind.ERROR:
            raise wire.unpack_error(body, self.name)
        return wire.unpack_json(body)

    def _receive(self) -> None:
        """Takes the next answer: they come in the order of the requests."""
        waiting = self._waiting.popleft()
        message = self._next_message()
        header = Header.unpack(message[0])
        body = memoryview(message[0])[wire.HEADER_SIZE :]
        if header.kind is Kind.ERROR:
            self._posted_error = self._posted_error or wire.unpack_error(body, self.name)
            return
        if header.request != waiting.number:
            raise self._broken(f"answered request {header.request} instead of {waiting.number}")
        operations = wire.unpack_operations(body)
        self._fill(header, message, wire.Filler([] if waiting.take is None else waiting.take(operations)))

    def _fill(self, header: Header, message: list[bytes], filler: wire.Filler) -> None:
        """Puts the bytes of an answer where they belong."""
        if filler.total != header.data_bytes:
            raise self._broken(f"sent {header.data_bytes} bytes for {filler.total}")
        if header.flags & wire.FLAG_SHARED:
            assert self._segment is not None
            filler.take(wire.tensor_bytes(self._segment.answer(header.data_bytes)))
        elif header.flags & wire.FLAG_INLINE:
            filler.take(memoryview(message[1]))
        else:
            taken = 0
            while taken < header.data_bytes:
                self._wait()
                frame = self._socket.recv(copy=False)
                taken += len(frame.buffer)
                filler.take(frame.buffer)

    def _next_message(self) -> list[bytes]:
        self._wait()
        message: list[bytes] = self._socket.recv_multipart()
        return message

    def _wait(self) -> None:
        if self._lost is not None:
            raise UnavailableError(self._lost)
        deadline, failures = Deadline(self._timeout), 0
        while True:
            left = deadline.remaining()
            ready = dict(self._poller.poll(1000 if left is None else min(left, 1.0) * 1000))
            # News first: what comes after a connection was lost is no answer to what was sent before.
            if self._monitor in ready:
                event = zmq_link.news(self._monitor)
                if event == "up":
                    self._up = True
                elif event == "down" and self._up:
                    raise self._broken("closed the connection or is gone" + ("" if self._returns else _ADVICE))
                elif event is not None:
                    failures += 1  # while keys were exchanged
                if event == "refused" or failures >= zmq_link.MOST_FAILURES:
                    raise self._broken("refused this process' key (TFSTYLE_PS_KEYS)")
            if self._socket in ready:
                return
            if deadline.passed():
                raise DeadlineExceededError(
                    f"{self.name} at {self.address} did not answer within {deadline}. Is it running, and does it "
                    "have the same keys (TFSTYLE_PS_KEYS)?"
                )

    def _broken(self, what: str) -> UnavailableError:
        """Remembers that the server is lost; what was sent and not answered may or may not have been applied."""
        self._lost = f"{self.name} at {self.address} {what}."
        self._waiting.clear()
        self._drop()
        return UnavailableError(self._lost)

    # ---- shared memory ----------------------------------------------------------------------------------------

    def values(self, variables: Iterable[int]) -> ValuesReader | None:
        """The variables that this process can read without asking; what it has written is among them.

        Args:
            variables: those that are wanted.

        Raises:
            UnavailableError: the server is gone.
            Exception: the first error that the server reported for what was sent before.
        """
        with self._lock:
            self.connect()
            if not self._shared or not shared_values.possible():
                return None
            self.finish()
            self._look()
            if self._values is None or any(v not in self._values and v not in self._values.private for v in variables):
                private = set() if self._values is None else self._values.private
                try:
                    self._values = ValuesReader(self.call({"method": "values"}))
                except OSError as error:
                    get_logger().info("%s: its variables cannot be read directly (%s)", self.name, error)
                    self._values = ValuesReader({"process": 0, "files": [], "bytes": [], "variables": []})
                self._values.private = private | {v for v in variables if v not in self._values}
            return self._values

    def _look(self) -> None:
        """Notices that the server is gone."""
        if self._lost is not None:
            raise UnavailableError(self._lost)
        while (event := zmq_link.news(self._monitor)) is not None:
            if event == "up":
                self._up = True
            elif event == "down" and self._up:
                raise self._broken("closed the connection or is gone" + ("" if self._returns else _ADVICE))

    def _use_segment(self, request_bytes: int, answer_bytes: int) -> bool:
        """Whether this batch uses shared memory; makes the segment large enough and free for it."""
        needed = max(request_bytes, answer_bytes)
        if not self._shared or needed <= wire.INLINE:
            return False
        if self._waiting:
            # The earlier requests' bytes must have been taken before they are overwritten.
            error, self._posted_error = self._posted_error, None
            while self._waiting:
                self._receive()
            self._posted_error = error or self._posted_error
        if self._segment is None or self._segment.half < needed:
            half = max(1 << 20, 1 << (needed - 1).bit_length())
            try:
                segment = Segment.create(half)
            except OSError as error:
                get_logger().warning("%s: no shared memory (%s); tensors travel by ZeroMQ", self.name, error)
                self._shared, self.lane = False, "ZeroMQ"
                return False
            try:
                self.call({"method": "segment", "path": str(segment.path), "half": half})
            except (OSError, RuntimeError, PermissionError) as error:
                if self._lost is not None:
                    segment.close()
                    raise
                get_logger().warning("%s cannot map shared memory (%s); tensors travel by ZeroMQ", self.name, error)
                self._shared, self.lane = False, "ZeroMQ"
                segment.close()
                return False
            segment.unlink()
            self._segment = segment
        return True


def _pack(tensors: Sequence[torch.Tensor], sizes: Sequence[int], flat: torch.Tensor) -> None:
    offset = 0
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        flat[offset : offset + nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += wire.padded(nbytes)
