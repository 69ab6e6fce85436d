"""The server of ``tf.distribute.experimental.rpc``: functions of this process that others call."""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfstyle_dist.coordinator import messages
from tfstyle_dist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.protocol import byte_streams, pickling, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import HEADER_SIZE, Header, Kind, ProtocolError, unpack_json
from tfstyle_dist.parameter_server.protocol.peer_loop import PeerLoop

OK, UNKNOWN = 0, 2
CODES: dict[type[BaseException], int] = {
    CancelledError: 1, InvalidArgumentError: 3, DeadlineExceededError: 4, NotFoundError: 5, PermissionError: 7,
    OutOfRangeError: 11, NotImplementedError: 12, UnavailableError: 14,
}  # fmt: skip


def check_layer(rpc_layer: str) -> None:
    """Refuses another layer than TensorFlow's.

    Raises:
        ValueError: it is not ``"grpc"``.
    """
    if rpc_layer != "grpc":
        raise ValueError(f'rpc_layer={rpc_layer!r}: write "grpc", TensorFlow\'s name; the messages travel by ZeroMQ.')


def error_code(error: BaseException) -> int:
    """TensorFlow's number of a kind of error."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), UNKNOWN)


class Server:
    """Lets other processes call functions of this one (``tf.distribute.experimental.rpc.Server``).

    The same keys and rules as for parameter servers hold: without ``TFSTYLE_PS_KEYS`` it listens on loopback only, and
    with keys only their holders are served. Arguments and results are pickled.

    Example:
        >>> server = Server.create("grpc", "localhost:4000")
        >>> server.register("add", lambda a, b: a + b)
        >>> server.start()

    Source: ``tf.distribute.experimental.rpc.Server``.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._functions: dict[str, Callable[..., Any]] = {}
        self._thread: threading.Thread | None = None
        self._loop: PeerLoop  # made by start()
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._stopping = False

    @staticmethod
    def create(rpc_layer: str, address: str) -> Server:
        """A server that does not listen yet.

        Args:
            rpc_layer: ``"grpc"``.
            address: ``host:port`` to listen at.

        Raises:
            ValueError: another layer.
        """
        check_layer(rpc_layer)
        return Server(address)

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Lets clients call ``func``.

        Args:
            method_name: the name they use.
            func: any function; calls may run at the same time in several threads.

        Raises:
            TypeError: ``func`` cannot be called.
            InvalidArgumentError: the name is taken.
        """
        if not callable(func):
            raise TypeError(f"register({method_name!r}, ...) takes a function, got {type(func).__name__}.")
        if method_name in self._functions:
            raise InvalidArgumentError(f"{method_name!r} is registered already; choose another name.")
        self._functions[method_name] = func

    def start(self) -> None:
        """Listens and serves, in threads of its own.

        Raises:
            UnavailableError: the address is in use.
            PermissionError: no keys, and an address that other machines can reach.
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError(
                f"This rpc server was started already and listens at {self._address}; make another one with "
                "Server.create for another address."
            )
        context = zeromq_sockets.new_context()
        try:
            socket = context.listen(self._address)
        except BaseException:
            context.close()
            raise
        self._loop = PeerLoop()
        self._thread = threading.Thread(target=self._serve, args=(context, socket), name="tfstyle-rpc", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends serving; calls that are under way are not waited for."""
        if self._thread is None or self._stopping:
            return
        self._stopping = True
        self._loop.wake()
        self._thread.join(30)

    def _serve(self, context: zeromq_sockets.Context, socket: Any) -> None:
        pool = ThreadPoolExecutor(8, thread_name_prefix="tfstyle-rpc-call")
        self._loop.add(socket, lambda: self._take(socket.recv_multipart(), pool))
        try:
            while not self._stopping:
                self._loop.turn(1000)
                while not self._answers.empty():
                    with contextlib.suppress(zeromq_sockets.ZMQError):  # that client is gone
                        socket.send_multipart(self._answers.get())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            socket.close(0)
            context.close()
            self._loop.close()

    def _take(self, parts: list[bytes], pool: ThreadPoolExecutor) -> None:
        identity, request = parts[0], 0
        try:
            header = Header.unpack(parts[1])
            request = header.request
            meta = unpack_json(memoryview(parts[1])[HEADER_SIZE:])
            if header.kind is Kind.HANDSHAKE:
                self._answers.put([identity, messages.plain(Kind.OK, {"methods": sorted(self._functions)}, request)])
            elif header.kind is Kind.CALL:
                joined = byte_streams.join(meta.get("sizes"), parts[2:])
                pool.submit(self._call, identity, request, str(meta.get("method")), joined)
            else:
                raise ProtocolError(f"an rpc server does not take messages of kind {header.kind.name}")
        except Exception as error:
            get_logger().warning("the rpc server at %s refuses a message: %s", self._address, error)
            self._fail(identity, request, error)

    def _call(self, identity: bytes, request: int, method: str, parts: Sequence[Any]) -> None:
        try:
            function = self._functions.get(method)
            if function is None:
                raise NotFoundError(f"No method {method!r} is registered; there are {sorted(self._functions)}.")
            arguments = pickling.loads(parts)
            _check_arguments(method, function, arguments)
            result = [bytes(part) for part in pickling.dumps(function(*arguments))]
            self._answers.put([identity, *messages.call({}, result, Kind.OK, request)])
            self._loop.wake()
        except BaseException as error:
            self._fail(identity, request, error)

    def _fail(self, identity: bytes, request: int, error: BaseException) -> None:
        text = str(error) if type(error) in CODES else f"{type(error).__name__}: {error}"
        body = {"code": error_code(error), "message": text[:4000]}
        self._answers.put([identity, messages.plain(Kind.ERROR, body, request)])
        self._loop.wake()


def _check_arguments(method: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Refuses a call that the function's parameters do not allow, before anything of it runs.

    Raises:
        InvalidArgumentError: too many arguments or too few.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InvalidArgumentError(
            f"Method {method!r} takes {signature}, but was called with {len(arguments)} argument(s): {error}. Give one "
            "for each parameter without a default."
        ) from None
