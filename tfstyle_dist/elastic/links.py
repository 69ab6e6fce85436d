"""Connections between the workers of an elastic job: one for each two, and one thread that serves them all.

Of each two workers the one with the larger number dials, again and again until the job begins. A connection that
closes, or on which nothing was heard for too long, is gone for good; a new one needs a new process at the other end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfstyle_dist.core.errors import DataLossError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.network import port_owner
from tfstyle_dist.elastic.connection import Connection
from tfstyle_dist.elastic.packets import Packet
from tfstyle_dist.shm.namespaces import boot_id, pid_namespace

_DIAL_AGAIN = 0.05
_DIAL_AGAIN_LATER = 0.5
_CHUNK = 1 << 20

Address = tuple[str, int]


class Links:
    """The connections of one worker.

    Args:
        me: this worker's number.
        addresses: of all workers.
        job: what tells this job from others; both ends must say the same.
        beat_every: seconds between two signs of life.
        suspect_after: seconds of silence after which a connection is given up.
        on_up: called with a worker's number when there is a connection to it.
        on_packet: called with a worker's number and what it sent.
        on_down: called with a worker's number, whether its process is known to be gone, and whether it was the other
            end that gave up, when a connection is gone; again when its process becomes known to be gone.

    All three are called by the thread, one at a time.

    Attributes:
        dials: whether workers there is no connection to are looked for.
    """

    def __init__(
        self,
        me: int,
        addresses: Sequence[Address],
        job: str,
        beat_every: float,
        suspect_after: float,
        on_up: Callable[[int], None],
        on_packet: Callable[[int, Packet], None],
        on_down: Callable[[int, bool, bool], None],
    ) -> None:
        self._me, self._addresses, self._job = me, list(addresses), job
        self._beat_every, self._suspect_after = beat_every, suspect_after
        self._on_up, self._on_packet, self._on_down = on_up, on_packet, on_down
        life = secrets.token_hex(8)
        self._hello = {"is": "hello", "job": job, "rank": me, "pid": os.getpid(), "place": _place(), "life": life}
        self._lock = threading.Lock()
        self._up: dict[int, Connection] = {}
        self._unsure: dict[int, Connection] = {}  # gone, and nobody knows yet whether the process is
        self._dialled: dict[int, float] = {}
        self._dialling: dict[int, Connection] = {}
        self._started = self._looked = time.monotonic()
        self.dials = True
        self._orders: list[Callable[[], None]] = []
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._listener = self._listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._bell, ring = socket.socketpair()
        self._ring = ring
        self._bell.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"tfstyle-elastic-{me}", daemon=True)

    def start(self) -> None:
        """Begins to listen and to connect; from now on the functions that were given are called."""
        self._thread.start()

    # ---- called by other threads ------------------------------------------------------------------------------

    def send(self, other: int, packet: Packet) -> None:
        """Sends, or keeps a copy of what cannot be sent yet; nothing happens if the worker is gone."""
        with self._lock:
            connection = self._up.get(other)
        if connection is not None:
            connection.send(packet)
            if connection.has_more():
                self._wake()

    def drop(self, other: int) -> None:
        """Closes a connection; the other end is told that it is meant so."""
        self._order(lambda: self._drop(other))

    def known(self) -> list[int]:
        """The workers there is a connection to."""
        with self._lock:
            return sorted(self._up)

    def close(self) -> None:
        """Sends what is left, says goodbye and ends the thread."""
        for other in self.known():
            self.send(other, Packet({"is": "bye"}))
        end = time.monotonic() + 2.0
        while time.monotonic() < end and any(c.has_more() for c in list(self._up.values())):
            self._wake()
            time.sleep(0.005)
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._ring.send(b"x")

    # ---- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._look_after()
                for key, events in self._selector.select(self._pause()):
                    self._handle(key.fileobj, key.data, events)
                with self._lock:
                    orders, self._orders = self._orders, []
                for order in orders:
                    order()
        except Exception:
            get_logger().exception("the connections of worker %d are given up", self._me)
            for rank in self.known():
                self._on_down(rank, False, False)
        finally:
            for key in list(self._selector.get_map().values()):
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._ring.close()

    def _pause(self) -> float:
        return 0.01 if self._unsure else min(self._beat_every, _DIAL_AGAIN) / 2

    def _handle(self, thing: Any, connection: Connection | None, events: int) -> None:
        if thing is self._listener:
            with contextlib.suppress(OSError):
                accepted, _ = self._listener.accept()
                self._register(Connection(accepted, None))
            return
        if thing is self._bell:
            with contextlib.suppress(OSError):
                self._bell.recv(4096)
            return
        assert connection is not None
        if connection.closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                if connection.connecting and not connection.finish_connecting(self._hello):
                    self._forget(connection)
                    return
                connection.flush()
            if events & selectors.EVENT_READ:
                for packet in connection.receive(_CHUNK):
                    self._on_received(connection, packet)
                    if connection.closed:
                        return
            self._watch(connection)
        except (OSError, EOFError, DataLossError) as error:
            self._gone(connection, error)

    def _on_received(self, connection: Connection, packet: Packet) -> None:
        kind = packet.header.get("is")
        if kind == "hello":
            self._greet(connection, packet.header)
        elif kind == "bye":
            connection.meant = connection.left = True
        elif kind == "drop":
            connection.meant = connection.dropped = True
        elif kind != "beat" and connection.rank is not None and self._up.get(connection.rank) is connection:
            self._on_packet(connection.rank, packet)

    def _greet(self, connection: Connection, hello: dict[str, Any]) -> None:
        rank = hello.get("rank")
        if hello.get("job") != self._job or not isinstance(rank, int) or not 0 <= rank < len(self._addresses):
            get_logger().warning(
                "refused a connection of worker %s of another job (%s; this one is %s)",
                rank,
                hello.get("job"),
                self._job,
            )
            self._forget(connection)
            return
        before = self._up.get(rank)
        if before is not None and before.peer.get("life") == hello.get("life"):
            self._forget(connection)  # the same process once more
            return
        connection.peer = hello
        self._dialling.pop(rank, None)
        if connection.accepted:
            connection.rank = rank
            connection.send(Packet(dict(self._hello)))
        if before is not None:  # a new process: of the old one nothing was heard yet
            self._gone(before, EOFError("a new process has its number"))
        self._unsure.pop(rank, None)
        with self._lock:
            self._up[rank] = connection
        self._on_up(rank)

    # ---- beats, dialling, loss --------------------------------------------------------------------------------

    def _look_after(self) -> None:
        now = time.monotonic()
        if now - self._looked > self._suspect_after:
            self._stood_still(now)
        self._looked = now
        for connection in list(self._up.values()):
            if now - connection.heard > self._suspect_after:
                get_logger().warning(
                    "worker %s was silent for %.1f s: given up", connection.rank, now - connection.heard
                )
                self._drop(connection.rank)
                continue
            if now - connection.said > self._beat_every and not connection.has_more():
                connection.send(Packet({"is": "beat"}))
            if connection.has_more():
                self._watch(connection)
        for rank in range(self._me if self.dials else 0):
            if rank in self._dialling and now - self._dialled[rank] > self._suspect_after:
                self._forget(self._dialling.pop(rank))
            free = rank not in self._up and rank not in self._dialling
            if free and now - self._dialled.get(rank, 0.0) > self._patience(now):
                self._dialled[rank] = now
                self._dial(rank)
        for rank, connection in list(self._unsure.items()):
            if self._is_dead(rank, connection):
                del self._unsure[rank]
                self._on_down(rank, True, False)
            elif now - connection.heard > 10 * self._suspect_after:
                del self._unsure[rank]

    def _stood_still(self, now: float) -> None:
        """This process was stopped for so long that the others have given it up; whoever is gone now did."""
        get_logger().warning("worker %d stood still for %.1f s", self._me, now - self._looked)
        for connection in self._up.values():
            connection.heard, connection.doubtful_until = now, now + self._suspect_after

    def _patience(self, now: float) -> float:
        return _DIAL_AGAIN if now - self._started < 10 else _DIAL_AGAIN_LATER

    def _dial(self, rank: int) -> None:
        with contextlib.suppress(OSError):
            host, port = self._addresses[rank]
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            dialled = socket.socket(family, kind, protocol)
            dialled.setblocking(False)
            dialled.connect_ex(address)
            self._dialling[rank] = Connection(dialled, rank)
            self._register(self._dialling[rank])

    def _register(self, connection: Connection) -> None:
        events = selectors.EVENT_WRITE if connection.connecting else selectors.EVENT_READ
        self._selector.register(connection.socket, events, connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_more() else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, rank: int | None) -> None:
        connection = self._up.get(-1 if rank is None else rank)
        if connection is None:
            return
        connection.send(Packet({"is": "drop"}))
        connection.meant = True
        self._gone(connection, None)

    def _forget(self, connection: Connection) -> None:
        if connection.rank is not None and self._dialling.get(connection.rank) is connection:
            del self._dialling[connection.rank]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    def _gone(self, connection: Connection, error: Exception | None) -> None:
        self._forget(connection)
        rank = connection.rank
        if rank is None or self._up.get(rank) is not connection:
            return
        with self._lock:
            del self._up[rank]
        if time.monotonic() < connection.doubtful_until:
            connection.meant = connection.dropped = True
        dead = connection.left or self._is_dead(rank, connection)
        if not dead:
            self._unsure[rank] = connection
        self._on_down(rank, dead, connection.dropped and not connection.left)

    def _is_dead(self, rank: int, connection: Connection) -> bool:
        """Whether the process at the other end is surely gone: on this host its number says so."""
        if connection.peer.get("place") == self._hello["place"]:
            return not _lives(connection.peer.get("pid"))
        if connection.meant:
            return False
        host, port = self._addresses[rank]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.settimeout(0.2)
            return probe.connect_ex((host, port)) == errno.ECONNREFUSED  # its host is there, and nobody listens
        return False

    def _listen(self) -> socket.socket:
        host, port = self._addresses[self._me]
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise UnavailableError(
                f"Worker {self._me} cannot listen at its own address {host}:{port}: {error.strerror}"
                f"{'' if (owner := port_owner(port)) is None else f' (in use by {owner})'}. In an elastic job every "
                "worker needs its own free port on its own host; change its address in TF_CONFIG on all workers."
            ) from error


def _place() -> str:
    """Where process numbers mean the same; of this process alone where that cannot be told."""
    boot, pids = boot_id(), pid_namespace()
    return f"{boot} {pids}" if boot and pids else f"{socket.gethostname()} {os.getpid()}"


def _lives(pid: Any) -> bool:
    try:
        with open(f"/proc/{int(pid)}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, ValueError, TypeError):
        return False
