"""The life of a client's connection to one parameter server: introduction, waiting, loss, coming back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.core import env
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server import wire, zmq_link
from tfstyle_dist.parameter_server.local_lane import LocalLane
from tfstyle_dist.parameter_server.visit import Visit
from tfstyle_dist.parameter_server.wire import Header, Kind
from tfstyle_dist.shm.namespaces import sharing_id

_ADVICE = (
    ", and its variables with it. Start the program again from a checkpoint; under "
    "ParameterServerStrategy(..., snapshot_folder=FOLDER) a server that is started again goes on from its snapshots"
)
_PROBE_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class Connection:
    """A connection to one server; calls from several threads take turns.

    Args:
        context: sockets and keys.
        address: of the server.
        name: of the server, for messages.
        hello: role, task and session of this process.
        timeout: limit of each wait; ``None``: none.

    Attributes:
        lane: how tensors travel.
        local: shared memory, if the server is on this host.
        stream: a TCP connection for requests and tensors, if there is one.
    """

    def __init__(
        self, context: zmq_link.Context, address: str, name: str, hello: dict[str, Any], timeout: timedelta | None
    ) -> None:
        self._context, self.address, self.name, self._hello, self._timeout = context, address, name, hello, timeout
        self._lock = threading.RLock()
        self._lost: str | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._up = False
        self._poller: Any = None
        self.lane = "none"
        self.local: LocalLane | None = None
        self.stream: Visit | None = None
        snapshots = hello.get("snapshots")
        self._returns: str | None = None if snapshots is None else str(snapshots["folder"])
        self._alive = False  # it was lost, but something listens at its address
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
            if env.shared_memory() and answer.get("host") and answer["host"] == sharing_id():
                self.local = LocalLane(self.name, self._timeout, self._call_now, self._look)
            elif env.parameter_server_tcp(self._context.keys is not None):
                self._open_stream()
            self.lane = "ZeroMQ" if self.stream is None else "TCP"
            if self.local is not None:
                self.lane = self.local.description
            get_logger().info("%s at %s: tensors travel by %s", self.name, self.address, self.lane)

    def _open_stream(self) -> None:
        host = self.address.rpartition(":")[0].strip("[]")
        try:
            told = self._call_now({"method": "door", "tcp": True})
            self.stream = Visit((host, int(told["port"])), str(told["token"]), self._timeout)
        except DeadlineExceededError:
            raise
        except OSError as error:  # of either end
            get_logger().info("%s: tensors go by ZeroMQ (%s)", self.name, error)

    @property
    def visit(self) -> Visit | None:
        """The socket that requests go through; ``None``: ZeroMQ."""
        return self.stream if self.local is None else self.local.visit

    def _introduce(self) -> dict[str, Any]:
        """Connects and says hello; with snapshots also to a server that is just being started again."""
        meta, deadline, said = wire.pack_json(self._hello), Deadline(self._timeout), False
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
                if not self._incarnation and (deadline.passed() or not said):
                    if deadline.passed():
                        raise
                    said = True
                    get_logger().warning("%s This process waits, at most %s.", error, deadline)
                if deadline.passed():
                    raise UnavailableError(
                        f"{self.name} at {self.address} was lost and did not come back within {deadline}. Start it "
                        f"again at the same address: it goes on from what it wrote to {self._returns}."
                    ) from error
                time.sleep(0.05)
        before, self._incarnation = self._incarnation, str(answer["incarnation"])
        if before not in ("", self._incarnation) and not answer.get("restored"):
            folder, self._returns = self._returns, None
            raise self._broken(
                f"was started again and found nothing of this program in {folder}"
                if folder
                else "was started again" + _ADVICE
            )
        return answer

    def forgive(self) -> bool:
        """Lets a server that was lost come back, if it can; whether it was lost."""
        if not self.may_return:
            return False
        self._lost = None
        return True

    @property
    def may_return(self) -> bool:
        """Whether the server was lost and can come back: from its snapshots, or because only the link broke."""
        return self._lost is not None and (self._returns is not None or self._alive)

    def close(self, goodbye: bool = True) -> None:
        """Takes leave and closes the connection."""
        with self._lock:
            if self._socket is None:
                return
            if goodbye and self._lost is None:
                self._socket.linger = 1000
                with contextlib.suppress(UnavailableError, TimeoutError):
                    farewell = [wire.message(Header(Kind.GOODBYE, 0), b"")]
                    if self.stream is None:
                        self._send_message(farewell)
                    else:
                        self._socket.send_multipart(farewell)
                        self.stream.await_end()  # were it closed first, the farewell would be a stranger's
            if self._socket is None:
                return
            self._drop()

    def _drop(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._socket = self._monitor = self._poller = None
        if self.local is not None:
            self.local.close()
            self.local = None
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _abandon(self, why: str) -> None:
        """The connection is lost: what was sent and not answered may or may not have been applied."""

    # ---- asking and waiting -----------------------------------------------------------------------------------

    def _exchange(self, header: Header, meta: bytes, frames: Sequence[Any]) -> dict[str, Any]:
        """Asks over ZeroMQ and waits for the answer; nothing else may be on its way."""
        self._socket.send_multipart([wire.message(header, meta), *frames])
        message = self._next_over_zmq()
        answer = Header.unpack(message[0])
        body = memoryview(message[0])[wire.HEADER_SIZE :]
        if answer.kind is Kind.ERROR:
            raise wire.unpack_error(body, self.name)
        return wire.unpack_json(body)

    def _call_now(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Calls a method of the server that takes no data; nothing else may be on its way."""
        body = wire.pack_json(meta)
        return self._exchange(Header(Kind.CALL, 0, meta_bytes=len(body)), body, [])

    def _next_over_zmq(self) -> list[bytes]:
        self._wait()
        message: list[bytes] = self._socket.recv_multipart()
        return message

    def _next_message(self) -> list[bytes]:
        """The next answer, on whichever way they come."""
        if self._lost is not None:
            raise UnavailableError(self._lost)
        if (visit := self.visit) is None:
            return self._next_over_zmq()
        with self._reporting():
            return visit.receive(self._timeout, self._look)

    def _receive_into(self, rooms: Sequence[memoryview]) -> None:
        """The bytes of tensors in an answer that comes over TCP."""
        assert self.stream is not None
        with self._reporting():
            self.stream.receive_into(rooms, self._timeout, self._look)

    def _send_message(self, parts: Sequence[Any]) -> None:
        """Sends a request; over ZeroMQ its tensors are in its parts or in shared memory."""
        if (visit := self.visit) is None:
            self._socket.send_multipart(parts)
            return
        with self._reporting():
            visit.send(parts, self._timeout, self._look)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turns what a socket raises into what users see."""
        try:
            yield
        except DeadlineExceededError:
            raise
        except ConnectionError:
            raise self._gone() from None
        except TimeoutError:
            # Half a message may be on its way: the next one must not be taken for the rest of it.
            late = self._silent(Deadline(self._timeout))
            self._broken("did not answer in time", alive=True)
            get_logger().warning("%s", late)
            raise late from None

    def _wait(self) -> None:
        if self._lost is not None:
            raise UnavailableError(self._lost)
        deadline, failures = Deadline(self._timeout), 0
        # A killed process closes its sockets one by one: it may have looked alive when it was lost.
        was_there = bool(self._incarnation) and self._returns is None
        while True:
            left, wait = deadline.remaining(), _LOOK_SECONDS if was_there and not self._up else 1.0
            ready = dict(self._poller.poll(1000 * (wait if left is None else min(left, wait))))
            # News first: what comes after a connection was lost is no answer to what was sent before.
            if self._monitor in ready:
                event = zmq_link.news(self._monitor)
                if event == "up":
                    self._up = True
                elif event == "down" and self._up:
                    raise self._gone()
                elif event is not None:
                    failures += 1  # while keys were exchanged
                if event == "refused" or failures >= zmq_link.MOST_FAILURES:
                    raise self._broken("refused this process' key (TFSTYLE_PS_KEYS)")
            if self._socket in ready:
                return
            if deadline.passed():
                raise self._silent(deadline)
            if not ready and not self._up and was_there and not _listens(self.address):
                raise self._broken("is gone" + _ADVICE)

    def _look(self) -> None:
        """Notices that the server is gone."""
        if self._lost is not None:
            raise UnavailableError(self._lost)
        while (event := zmq_link.news(self._monitor)) is not None:
            if event == "up":
                self._up = True
            elif event == "down" and self._up:
                raise self._gone()

    def _silent(self, deadline: Deadline) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self.name} at {self.address} did not answer within {deadline}. Is it running, and does it "
            "have the same keys (TFSTYLE_PS_KEYS)?"
        )

    def _gone(self) -> UnavailableError:
        """The connection was closed: has the server died, or only the link?"""
        if self._returns is not None:
            return self._broken("closed the connection or is gone")
        alive = _listens(self.address)
        why = "closed the connection" if alive else "closed the connection or is gone" + _ADVICE
        return self._broken(why, alive)

    def _broken(self, what: str, alive: bool = False) -> UnavailableError:
        """Remembers that the server is lost."""
        self._lost, self._alive = f"{self.name} at {self.address} {what}.", alive
        self._abandon(self._lost)
        self._drop()
        return UnavailableError(self._lost)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True
