"""The only user of ZeroMQ: sockets with heartbeats, keys and an allow-list, and the news of a monitor."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import weakref
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core import env
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.parameter_server.addresses import bindable, host_and_port, is_loopback
from tfstyle_dist.parameter_server.protocol.header import CHUNK, MAX_META
from tfstyle_dist.parameter_server.protocol.key_pair import Keys

if TYPE_CHECKING:
    import zmq

    ZMQError, Again = zmq.ZMQError, zmq.Again
    POLLIN, POLLOUT, RCVMORE = zmq.POLLIN, zmq.POLLOUT, zmq.RCVMORE
    SNDMORE, DONTWAIT = zmq.SNDMORE, zmq.NOBLOCK

_MAX_MESSAGE = max(CHUNK, MAX_META) + (1 << 16)
_HEARTBEAT_MS, _LOST_MS = 500, 5000  # a process that gets no time for 2 s is no rarity on a busy machine
_FILES = 1 << 16
_ZAP_DOMAIN = "tfstyle"


def __getattr__(name: str) -> Any:
    """Loads pyzmq, which is optional, when it is first needed."""
    if name not in ("zmq", "ZMQError", "Again", "POLLIN", "POLLOUT", "RCVMORE", "SNDMORE", "DONTWAIT"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load()
    return globals()[name]


def load() -> None:
    """Imports pyzmq.

    Raises:
        ImportError: it is missing; the message says what to install.
    """
    try:
        import zmq
        import zmq.auth.thread
        import zmq.utils.monitor
    except ImportError as missing:  # pragma: no cover
        raise ImportError(
            "Parameter servers need pyzmq and cloudpickle, and pyzmq cannot be imported: pip install pyzmq cloudpickle "
            "(the extra 'ps' of tfstyle_dist)."
        ) from missing
    globals().update(
        zmq=zmq, ZMQError=zmq.ZMQError, Again=zmq.Again, POLLIN=zmq.POLLIN, POLLOUT=zmq.POLLOUT, RCVMORE=zmq.RCVMORE,
        SNDMORE=zmq.SNDMORE, DONTWAIT=zmq.NOBLOCK,
    )  # fmt: skip


def key_pair() -> dict[str, str]:
    """A new key pair, as key files hold it."""
    load()
    public, secret = zmq.curve_keypair()
    return {"public": public.decode(), "secret": secret.decode()}


def new_keys(path: str | os.PathLike[str]) -> None:
    """Writes a new key pair, readable by the owner only; never overwrites one."""
    pair = key_pair()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(pair, file)


class _AllowList:
    """ZAP: admits the holders of the cluster's key alone."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this printable key may connect."""
        return key == self._public


class Context:
    """A ZeroMQ context with the cluster's keys.

    Args:
        keys: the key pair; ``None``: no encryption, loopback only.
    """

    def __init__(self, keys: Keys | None) -> None:
        load()
        self.keys = keys
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, self.context.get(zmq.SOCKET_LIMIT))
        self._authenticators: list[Any] = []
        self._open: list[Any] = []
        self._lock = threading.Lock()
        # Were sockets collected together with their context, ZeroMQ would wait for ever that they are closed.
        self._finalizer = weakref.finalize(self, _end, self.context, self._open, self._authenticators)
        self._finalizer.atexit = False  # threads use them to the very end
        _use_all_files()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        if not self._finalizer.alive:
            raise UnavailableError(
                "The links to the tasks were closed, e.g. by strategy.close(). Read what you need before that, or make "
                "a new strategy."
            )
        try:
            socket = self.context.socket(kind)
        except zmq.ZMQError as error:
            raise UnavailableError(_too_many(error)) from None
        with self._lock:
            self._open[:] = [*(known for known in self._open if not known.closed), socket]
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, _MAX_MESSAGE),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, _LOST_MS), (zmq.HEARTBEAT_TTL, _LOST_MS),
            (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 500), (zmq.IPV6, 1),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        return socket

    def listen(self, address: str) -> zmq.Socket[bytes]:
        """A ROUTER that clients of the cluster can connect to.

        Raises:
            InvalidArgumentError: the address has no port.
            UnavailableError: the address is in use.
            PermissionError: without keys on an interface that others can reach.
        """
        host, port = host_and_port(address)
        if self.keys is None and not is_loopback(host) and not env.insecure_parameter_server():
            raise PermissionError(
                f"A server without keys at {address} would run functions for anyone who can reach it. Make a key "
                "file with `python -m tfstyle_dist.parameter_server.keys PATH` and set TFSTYLE_PS_KEYS=PATH on every "
                "task, or, on a network that you trust, set TFSTYLE_PS_INSECURE=1."
            )
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self.keys is not None:
            self._authenticate(self.keys.public)
            # Without a domain that is enforced, ZeroMQ admits everybody while nobody answers for the allow-list.
            socket.zap_domain, socket.zap_enforce_domain = _ZAP_DOMAIN.encode(), 1
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        try:
            socket.bind(f"tcp://{bindable(host)}:{port}")
        except zmq.ZMQError as error:
            socket.close()
            raise UnavailableError(
                f"Cannot listen at {address}: {error}. Is another task with the same job name and index running?"
            ) from None
        return socket

    def connect(self, address: str, identity: bytes) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A DEALER to the task at ``address``, and the monitor of its connection."""
        host, port = host_and_port(address)
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        if self.keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
            socket.curve_serverkey = self.keys.public
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        try:
            monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        except zmq.ZMQError as error:
            socket.close(0)
            raise UnavailableError(_too_many(error)) from None
        socket.connect(f"tcp://{host}:{port}")
        return socket, monitor

    def _authenticate(self, public: bytes) -> None:
        if not self._authenticators:
            made = zmq.auth.thread.ThreadAuthenticator(self.context)
            self._authenticators.append(made)
            made.start()
            made.configure_curve_callback(_ZAP_DOMAIN, _AllowList(public))

    def close(self) -> None:
        """Closes all its sockets."""
        self._finalizer()


def new_context() -> Context:
    """Sockets with the keys that the environment names."""
    path = env.parameter_server_keys()
    return Context(None if path is None else Keys.load(path))


def _end(context: Any, sockets: list[Any], authenticators: list[Any]) -> None:
    """Closes a context, after the threads and the sockets that use it."""
    for authenticator in authenticators:
        authenticator.stop()
    context.destroy(linger=0)
    sockets.clear()


def _use_all_files() -> None:
    """A link takes three open files, and a process may open 1024 as a rule: takes what it may take if it asks."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _too_many(error: Exception) -> str:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"No socket could be made ({error}). This process may have {files} files open, and needs three for each task "
        "that it talks to. Raise the limit before it starts: ulimit -Hn 65536 (as root), or LimitNOFILE= in a "
        "systemd unit."
    )


class ConnectionCount:
    """How many connections a listening socket has; any thread may ask.

    Args:
        socket: what ``Context.listen`` gave.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._count, self.ever, self._closed = 0, False, False
        self._lock = threading.Lock()

    def count(self) -> int:
        """The number of connections now."""
        with self._lock:
            while not self._closed and (event := next_event(self._monitor)) is not None:
                self._count = self._count + 1 if event == "up" else max(self._count - 1, 0)
                self.ever = self.ever or event == "up"
            return self._count

    def close(self) -> None:
        """Stops counting."""
        with self._lock:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)


def next_event(monitor: Any) -> str | None:
    """The next event of a connection, or ``None`` when there is none.

    Returns:
        ``"up"``, ``"down"``, ``"refused"`` (the peer said so) or ``"failed"`` (it went away while keys were exchanged:
        its keys differ, or it was just killed).
    """
    while True:
        try:
            event = zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "up"
        if event == zmq.EVENT_DISCONNECTED:
            return "down"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "failed"
        if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            return "refused"


def silence(name: str, grace_seconds: float) -> UnavailableError:
    """What a task raises that has lost its coordinator.

    Args:
        name: the task.
        grace_seconds: how many seconds it waited.
    """
    return UnavailableError(
        f"{name} has not heard from its coordinator for {grace_seconds:g} s and ends. Start it again together with the "
        "coordinator."
    )


def poller(*entries: Any) -> zmq.Poller:
    """A poller for reading from sockets and file descriptors."""
    result = zmq.Poller()
    for entry in entries:
        result.register(entry, zmq.POLLIN)
    return result
