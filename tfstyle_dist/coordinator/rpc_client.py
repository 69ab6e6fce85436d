"""``tf.distribute.experimental.rpc``: functions of one process that others call, over parameter servers' links."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.rpc_server import CODES, OK, UNKNOWN, Server, check_layer
from tfstyle_dist.core import env
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from tfstyle_dist.parameter_server.protocol import byte_streams, pickling, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import HEADER_SIZE, Header, Kind, unpack_json
from tfstyle_dist.parameter_server.protocol.peer_loop import News, Peer

__all__ = ["Client", "Server", "StatusOrResult"]


class StatusOrResult:
    """The outcome of a call, once it is there: each method waits for it.

    Source: what ``tf.distribute.experimental.rpc.Client.call`` returns.
    """

    def __init__(self, client: Client, number: int, deadline: Deadline) -> None:
        self._client, self._number, self._deadline = client, number, deadline
        self._outcome: tuple[int, Any] | None = None

    def _wait(self) -> tuple[int, Any]:
        if self._outcome is None:
            self._outcome = self._client._outcome(self._number, self._deadline)
        return self._outcome

    def is_ok(self) -> bool:
        """Whether the function has returned."""
        return self._wait()[0] == OK

    def get_error(self) -> tuple[int, str]:
        """The code that gRPC has for the error, and its message; ``(0, "")`` if there is none."""
        code, value = self._wait()
        return (code, "" if code == OK else value)

    def get_value(self) -> Any:
        """What the function returned.

        Raises:
            Exception: the call failed, by kind: NotFoundError, UnavailableError, DeadlineExceededError, ...;
                RuntimeError for what the function raised otherwise.
        """
        code, value = self._wait()
        if code != OK:
            kind = next((kind for kind, number in CODES.items() if number == code), RuntimeError)
            raise kind(value)
        return value


class Client:
    """Calls functions of another process (``tf.distribute.experimental.rpc.Client``).

    The registered names are methods of the client, too; those that end in ``_blocking`` wait and return the value.

    Example:
        >>> client = Client.create("grpc", "localhost:4000")
        >>> client.call("add", [1, 2]).get_value()
        3
        >>> client.add(1, 2, timeout_in_ms=5000).is_ok()
        True
        >>> client.add_blocking(1, 2)
        3

    Source: ``tf.distribute.experimental.rpc.Client``.
    """

    def __init__(self, address: str, name: str, timeout: timedelta | None) -> None:
        self._address, self._name, self._timeout = address, name or "client", timeout
        self._context = zeromq_sockets.new_context()
        self._lock = threading.RLock()
        self._number = 0
        self._pending: set[int] = set()
        self._outcomes: dict[int, tuple[int, Any]] = {}
        self._peer = Peer(self._context, address, b"r")
        self._socket = self._peer.socket
        self._poller = zeromq_sockets.poller(self._socket, self._peer.monitor)
        self._finalizer = weakref.finalize(self, _close, self._context, self._peer)

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """Connects to a server and asks for the names of its functions.

        Args:
            rpc_layer: ``"grpc"``.
            address: ``host:port`` of the server.
            name: for messages.
            timeout_in_ms: limit for this and for calls without one of their own; 0: ``TFSTYLE_TIMEOUT_SECONDS``.

        Raises:
            ValueError: another layer.
            DeadlineExceededError: no server answers in time.
            UnavailableError: it refuses this process' key.
        """
        check_layer(rpc_layer)
        client = Client(address, name, timedelta(milliseconds=timeout_in_ms) if timeout_in_ms else env.timeout())
        try:
            client._learn_methods()
        except BaseException:
            client.close()
            raise
        return client

    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """Calls a function of the server; returns at once.

        Args:
            method_name: the registered name.
            args: positional arguments.
            output_specs: accepted for TF's signature; results keep their structure.
            timeout_in_ms: limit of the wait for the result; 0: the client's.

        Returns:
            The outcome to come.

        Raises:
            TypeError: something in ``args`` cannot be sent to another process.
        """
        parts = [bytes(part) for part in pickling.dumps(list(args or ()))]
        limit = timedelta(milliseconds=timeout_in_ms) if timeout_in_ms else self._timeout
        with self._lock:
            number = self._next()
            self._socket.send_multipart(messages.call({"method": method_name}, parts, request=number))
        return StatusOrResult(self, number, Deadline(limit))

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._finalizer()

    # ---- waiting ----------------------------------------------------------------------------------------------

    def _next(self) -> int:
        if not self._finalizer.alive:
            raise UnavailableError(f"The rpc client {self._name!r} was closed.")
        self._number += 1
        self._pending.add(self._number)
        return self._number

    def _learn_methods(self) -> None:
        with self._lock:
            number = self._next()
            self._socket.send_multipart([messages.plain(Kind.HANDSHAKE, {}, number)])
        code, value = self._outcome(number, Deadline(self._timeout))
        if code != OK:
            raise (DeadlineExceededError if code == CODES[DeadlineExceededError] else UnavailableError)(value)
        for end, blocking in (("", False), ("_blocking", True)):  # a method that is called so comes first
            for method in value["methods"]:
                name = method + end
                if name.isidentifier() and not hasattr(self, name):
                    setattr(self, name, self._caller(method, name, blocking))

    def _caller(self, method: str, name: str, blocking: bool) -> Callable[..., Any]:
        def call(*args: Any, timeout_in_ms: int = 0) -> Any:
            outcome = self.call(method, args, timeout_in_ms=timeout_in_ms)
            return outcome.get_value() if blocking else outcome

        call.__name__ = call.__qualname__ = name
        call.__doc__ = f"RPC Call for {method} method to server {self._address}"
        return call

    def _outcome(self, number: int, deadline: Deadline) -> tuple[int, Any]:
        while True:
            with self._lock:
                if number in self._outcomes:
                    return self._outcomes.pop(number)
                if not self._finalizer.alive:
                    return CODES[CancelledError], f"The rpc client {self._name!r} was closed."
                if deadline.passed():
                    self._pending.discard(number)
                    return CODES[DeadlineExceededError], (
                        f"The rpc server at {self._address} did not answer within {deadline}. Is it running, and does "
                        "it have the same keys (TFSTYLE_PS_KEYS)?"
                    )
                self._receive(min(1000 * (deadline.pause() or 1.0), 100))

    def _receive(self, milliseconds: float) -> None:
        ready = dict(self._poller.poll(int(milliseconds)))
        while self._peer.monitor in ready and (news := self._peer.news()) is not None:
            if news is News.LOST:
                self._fail_all(f"The rpc server at {self._address} closed the connection or is gone.")
            elif news is News.REFUSED:
                self._fail_all(f"The rpc server at {self._address} refused this process' key (TFSTYLE_PS_KEYS).")
        if self._socket not in ready:
            return
        parts = self._socket.recv_multipart()
        header = Header.unpack(parts[0])
        if header.request not in self._pending:
            return  # it came after its deadline, or before the connection was lost
        self._pending.discard(header.request)
        told = unpack_json(memoryview(parts[0])[HEADER_SIZE:])
        if header.kind is Kind.ERROR:
            code = told.get("code")
            self._outcomes[header.request] = (
                code if type(code) is int and code != OK else UNKNOWN,
                str(told.get("message")),
            )
        elif "methods" in told:
            self._outcomes[header.request] = OK, told
        else:
            try:
                outcome = OK, pickling.loads(byte_streams.join(told.get("sizes"), parts[1:]))
            except Exception as error:
                outcome = UNKNOWN, f"the result cannot be read here: {error!r}"
            self._outcomes[header.request] = outcome

    def _fail_all(self, message: str) -> None:
        for number in self._pending:
            self._outcomes[number] = CODES[UnavailableError], message
        self._pending.clear()


def _close(context: zeromq_sockets.Context, peer: Peer) -> None:
    peer.close()
    context.close()
