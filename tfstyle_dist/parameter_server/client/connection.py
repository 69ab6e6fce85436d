"""The life of a client's connection to one parameter server: handshake, waiting, loss, coming back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.network import is_listening
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import (
    HEADER_SIZE,
    Header,
    Kind,
    pack_json,
    pack_message,
    unpack_error,
    unpack_json,
)
from tfstyle_dist.parameter_server.protocol.peer_loop import News, Peer
from tfstyle_dist.parameter_server.transports.available import open_transport
from tfstyle_dist.parameter_server.transports.transport import Transport
from tfstyle_dist.parameter_server.transports.zeromq import ZeroMQTransport

_ADVICE = (
    ", and its variables with it. Start the program again from a checkpoint; under "
    "ParameterServerStrategy(..., snapshot_folder=FOLDER) a server that is started again goes on from its snapshots"
)
_UNREACHED = "cannot be reached by this worker: its address means another machine here, or it "
_CHECK_SECONDS = 0.05
_GOODBYE_MS = 1000


class Connection:
    """A connection to one server; calls from several threads take turns.

    Args:
        context: sockets and keys.
        address: of the server.
        name: of the server, for messages.
        handshake: role, task and session of this process.
        timeout: limit of each wait; ``None``: none.

    Attributes:
        timeout: limit of each wait.
        transport: how requests and tensors travel; ``None`` while there is no connection.
        transport_name: of the latest one.
    """

    def __init__(
        self,
        context: zeromq_sockets.Context,
        address: str,
        name: str,
        handshake: dict[str, Any],
        timeout: timedelta | None,
    ) -> None:
        self._context, self.address, self.name, self.timeout = context, address, name, timeout
        self.handshake = handshake
        self._lock = threading.RLock()
        self._lost: str | None = None
        self._peer: Peer | None = None
        self._poller: Any = None
        self.transport: Transport | None = None
        self.transport_name = "none"
        snapshots = handshake.get("snapshots")
        self._returns: str | None = None if snapshots is None else str(snapshots["folder"])
        self._alive = False  # it was lost, but something listens at its address
        self._incarnation = ""

    @property
    def socket(self) -> Any:
        """Of ZeroMQ."""
        assert self._peer is not None
        return self._peer.socket

    @property
    def has_keys(self) -> bool:
        """Whether messages by ZeroMQ are encrypted."""
        return self._context.keys is not None

    @property
    def is_near(self) -> bool:
        """Whether the server is on this host, and its variables can be read where they are."""
        return self.transport is not None and self.transport.is_near

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
            if self._peer is not None:
                return
            answer = self._introduce()
            self.transport = ZeroMQTransport(self)
            self.use(open_transport(self, answer))
            get_logger().info("%s at %s: tensors travel by %s", self.name, self.address, self.transport_name)

    def use(self, transport: Transport) -> None:
        """From now on requests and tensors travel by a transport."""
        self.transport, self.transport_name = transport, transport.name

    def _introduce(self) -> dict[str, Any]:
        """Connects and makes the handshake; with snapshots also with a server that is just being started again."""
        meta, deadline, said = pack_json(self.handshake), Deadline(self.timeout), False
        fresh = not self._incarnation
        while True:
            self._peer = Peer(self._context, self.address, b"c")
            self._poller = zeromq_sockets.poller(self._peer.socket, self._peer.monitor)
            try:
                answer = self._exchange(Header(Kind.HANDSHAKE, 0, meta_bytes=len(meta)), meta, [])
                break
            except Exception as error:
                if self._peer is not None:
                    self._drop()
                if isinstance(error, TimeoutError):
                    self._lost = None  # nothing stood that could be lost
                if fresh and self._lost is not None:  # a task whose last coordinator left closes, and listens anew
                    fresh, self._lost = False, None
                    continue
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
            found = f" and found nothing of this program in {folder}" if folder else _ADVICE
            raise self.lose("was started again" + found)
        return answer

    def reconnect(self) -> bool:
        """Lets a server that was lost come back, if it can, at the next request; whether it was lost."""
        if not self.may_return:
            return False
        self._lost = None
        return True

    @property
    def may_return(self) -> bool:
        """Whether the server was lost and can come back: from its snapshots, or because only the link broke."""
        return self._lost is not None and (self._returns is not None or self._alive)

    def close(self, goodbye: bool = True) -> None:
        """Says goodbye and closes the connection."""
        with self._lock:
            if self._peer is None and goodbye and self._lost is not None and self._alive:  # once it was late
                self._lost, self.timeout = None, timedelta(milliseconds=_GOODBYE_MS)
                with contextlib.suppress(UnavailableError, TimeoutError):
                    self.connect()
            if self._peer is None:
                return
            if goodbye and self._lost is None and self.transport is not None:
                with contextlib.suppress(UnavailableError, TimeoutError):
                    try:
                        self.transport.say_goodbye(pack_message(Header(Kind.GOODBYE, 0), b""))
                    except (ConnectionError, TimeoutError) as error:
                        raise self.reported(error) from None
            if self._peer is not None:
                self._drop(_GOODBYE_MS)

    def _drop(self, linger_ms: int = 0) -> None:
        assert self._peer is not None
        self._peer.close(linger_ms)
        self._peer = self._poller = None
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def _abort(self, why: str) -> None:
        """The connection is lost: what was sent and not answered may or may not have been applied."""

    # ---- asking and waiting -----------------------------------------------------------------------------------

    def _exchange(self, header: Header, meta: bytes, frames: Sequence[Any]) -> dict[str, Any]:
        """Asks over ZeroMQ and waits for the answer; nothing else may be on its way."""
        self.socket.send_multipart([pack_message(header, meta), *frames])
        try:
            self.wait()
        except TimeoutError as error:
            raise self.reported(error) from None
        message: list[bytes] = self.socket.recv_multipart()
        answer = Header.unpack(message[0])
        body = memoryview(message[0])[HEADER_SIZE:]
        if answer.kind is Kind.ERROR:
            raise unpack_error(body, self.name)
        return unpack_json(body)

    def call_now(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Calls a method of the server that takes no data; nothing else may be on its way."""
        body = pack_json(meta)
        return self._exchange(Header(Kind.CALL, 0, meta_bytes=len(body)), body, [])

    def reported(self, error: Exception) -> Exception:
        """What users see of what a transport raised: a ``ConnectionError`` or a ``TimeoutError``."""
        if isinstance(error, ConnectionError):
            return self.gone()
        # What comes late, or the rest of half a message, must not be taken for the answer to what is asked next.
        late = error if isinstance(error, DeadlineExceededError) else self._silent(Deadline(self.timeout))
        self.lose("did not answer in time", alive=True)
        get_logger().warning("%s", late)
        return late

    def wait(self) -> None:
        """Waits for a message by ZeroMQ.

        Raises:
            UnavailableError: the server is gone.
            DeadlineExceededError: nothing came in time.
        """
        if self._lost is not None:
            raise UnavailableError(self._lost)
        assert self._peer is not None
        peer, deadline = self._peer, Deadline(self.timeout)
        # A killed process may have looked alive when it was lost; what a worker hears of, the coordinator has reached.
        was_there = self._returns is None and (bool(self._incarnation) or self.handshake.get("role") == "worker")
        pause = _CHECK_SECONDS
        while True:
            left, wait = deadline.remaining(), pause if was_there and not peer.up else 1.0
            ready = dict(self._poller.poll(1000 * (wait if left is None else min(left, wait))))
            # News first: what comes after a connection was lost is no answer to what was sent before.
            if peer.monitor in ready:
                self._take_news()
            if peer.socket in ready:
                return
            if deadline.passed():
                raise self._silent(deadline)
            if not ready and not peer.up and was_there:
                if not is_listening(self.address, not self._incarnation):
                    raise self.lose(("" if self._incarnation else _UNREACHED) + "is gone" + _ADVICE)
                pause = min(2 * pause, 1.0)  # a server that is late takes none of them from its queue of 100

    def check(self) -> None:
        """Raises if the server is gone."""
        if self._lost is not None:
            raise UnavailableError(self._lost)
        self._take_news()

    def _take_news(self) -> None:
        assert self._peer is not None
        while (news := self._peer.news()) is not None:
            if news is News.LOST:
                raise self.gone()
            if news is News.REFUSED:
                raise self.lose("refused this process' key (TFSTYLE_PS_KEYS)")

    def _silent(self, deadline: Deadline) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self.name} at {self.address} did not answer within {deadline}. Is it running, and does it "
            "have the same keys (TFSTYLE_PS_KEYS)?"
        )

    def gone(self) -> UnavailableError:
        """The connection was closed: has the server died, or only the link?"""
        if self._returns is not None:
            return self.lose("closed the connection or is gone")
        alive = is_listening(self.address)
        why = "closed the connection" if alive else "closed the connection or is gone" + _ADVICE
        return self.lose(why, alive)

    def lose(self, what: str, alive: bool = False) -> UnavailableError:
        """Remembers that the server is lost.

        Args:
            what: has become of it, for the message.
            alive: whether something listens at its address.
        """
        self._lost, self._alive = f"{self.name} at {self.address} {what}.", alive
        self._abort(self._lost)
        self._drop()
        return UnavailableError(self._lost)
