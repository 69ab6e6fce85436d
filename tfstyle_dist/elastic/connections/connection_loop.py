"""Connections between the workers of an elastic job: one for each two, and one thread that serves them all.

Of each two workers the one with the larger number dials, again and again while there is no connection. A connection
that closes, or on which nothing was heard for too long, is gone for good; a new one needs a new process at one end.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger, warn_once
from tfstyle_dist.elastic.connections import forks
from tfstyle_dist.elastic.connections.address_lookup import Address, AddressLookup
from tfstyle_dist.elastic.connections.connection import Connection
from tfstyle_dist.elastic.connections.dialling import Dialler
from tfstyle_dist.elastic.connections.doorbell import Doorbell
from tfstyle_dist.elastic.connections.failure_detector import FailureDetector
from tfstyle_dist.elastic.connections.liveness import is_gone, listen
from tfstyle_dist.elastic.connections.open_connections import CHUNK, OpenConnections, say_why_closed
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.connections.peer_handshake import answer, introduction, refusal
from tfstyle_dist.elastic.options import Elastic

_LONGEST_PAUSE = 0.025


class ConnectionLoop:
    """The connections of one worker.

    Args:
        me: this worker's number.
        addresses: of all workers.
        job: what tells this job from others; both ends must say the same.
        options: of the job.
        doorbell: where this process waits.
        on_up: called with a worker's number when there is a connection to it.
        on_packet: called with a worker's number and what it sent.
        on_down: called with a worker's number, whether its process is known to be gone, and whether it was the other
            end that gave up, when a connection is gone; again when its process becomes known to be gone.

    All three are called by the thread, ``on_packet`` by whoever calls ``look`` too.

    Attributes:
        life: tells this process from others that have had its number.
        goes_on: whether this worker is one of those that go on; told to those that it has lost, should they be there.
        known: gives the workers there is a connection to.
        left_behind: whether a worker that this one has lost has said that it goes on without it.
    """

    def __init__(
        self,
        me: int,
        addresses: Sequence[Address],
        job: str,
        options: Elastic,
        doorbell: Doorbell,
        on_up: Callable[[int], None],
        on_packet: Callable[[int, Packet], None],
        on_down: Callable[[int, bool, bool], None],
    ) -> None:
        self._me, self._job, self._options, self._doorbell = me, job, options, doorbell
        self._on_up, self._on_packet, self._on_down = on_up, on_packet, on_down
        self.life, self.goes_on, self.left_behind = secrets.token_hex(8), False, False
        self._hello = introduction(me, job, self.life, doorbell)
        self._silence = FailureDetector(me, options, str(self._hello["place"]))
        self._open = OpenConnections(self._on_received, lambda broken: self._order(lambda: self._gone(broken)))
        self.known = self._open.ranks
        self._unsure: dict[int, Connection] = {}  # gone, and nobody knows yet whether the process is
        self._lookups = [AddressLookup(address) for address in addresses]
        self._dialler = Dialler(self._lookups, options.suspect_after)
        self._past: dict[int, str] = {}  # the last process there was a connection to
        self._orders, self._closing = list[Callable[[], None]](), False
        self._selector, self._lock = selectors.DefaultSelector(), threading.Lock()
        self._listener = listen(me, addresses[me])
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        for each in (self._listener, self._bell):
            self._selector.register(each, selectors.EVENT_READ)
        forks.close_in_children(self)
        self._thread = threading.Thread(target=self._serve, name=f"tfstyle-elastic-{me}", daemon=True)

    def start(self) -> None:
        """Begins to listen and to connect; from now on the functions that were given are called."""
        self._thread.start()

    # ---- called by other threads ------------------------------------------------------------------------------

    def send(self, other: int, packet: Packet) -> None:
        """Sends, or keeps a copy of what cannot be sent yet; nothing happens if the worker is gone."""
        if (connection := self._open.get(other)) is not None:
            connection.send(packet)
            if connection.has_more():
                self._wake()

    def has_more(self, others: Iterable[int]) -> bool:
        """Whether something was kept for workers that read it from shared memory."""
        return self._open.has_more(others)

    def look(self) -> bool:
        """Takes what has come in shared memory, and writes what was kept; returns whether something has come."""
        return self._open.look()

    def drop(self, other: int) -> None:
        """Closes the connection that there is now; the other end is told that it is meant so."""
        connection = self._open.get(other)
        self._order(lambda: self._drop(connection))

    def close(self) -> None:
        """Sends what is left, says goodbye and ends the thread."""
        for other in self.known():
            self.send(other, Packet({"is": "bye"}))
        end = time.monotonic() + 2.0
        while time.monotonic() < end and any(c.has_more() for c in self._open.all()):
            self._wake()
            time.sleep(0.005)
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def sockets(self) -> list[Any]:
        """All that are open, those of attempts to connect too."""
        return [self._ring, *(key.fileobj for key in (self._selector.get_map() or {}).values())]

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
                self.look()
                pause = 0.01 if self._unsure else min(self._options.beat_every / 2, _LONGEST_PAUSE)
                for key, events in self._selector.select(pause):
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
            for each in self.sockets():
                with contextlib.suppress(OSError):
                    each.close()
            self._selector.close()
            self._doorbell.close()

    def _handle(self, thing: Any, connection: Connection | None, events: int) -> None:
        with contextlib.suppress(OSError):
            if thing is self._bell:
                self._bell.recv(4096)
            if thing is self._listener:
                stranger = Connection(self._listener.accept()[0], None)
                self._selector.register(stranger.socket, selectors.EVENT_READ, stranger)
                self._open.strangers.admit(stranger)
        if connection is None or connection.closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                if connection.connecting and not connection.finish_connecting({**self._hello, "on": self.goes_on}):
                    self._forget(connection)
                    return
                connection.flush()
            if connection.rings is not None:
                connection.hear()
                self.look()
            elif events & selectors.EVENT_READ:
                for packet in connection.receive(CHUNK):
                    self._on_received(connection, packet)
                    if connection.closed or connection.rings is not None:
                        return  # what comes now comes through memory
            self._watch(connection)
        except (OSError, EOFError, DataLossError) as error:
            if isinstance(error, DataLossError):
                say_why_closed(connection, error)
            self._gone(connection)

    def _on_received(self, connection: Connection, packet: Packet) -> None:
        kind = packet.header.get("is")
        if kind == "hello":
            self._greet(connection, packet.header)
        elif kind == "bye":
            connection.meant = connection.left = True
        elif kind == "drop":
            connection.meant = connection.dropped = True
            self._hear_of_the_others(connection.rank, packet.header)
        elif kind != "beat" and connection.rank is not None and self._open.get(connection.rank) is connection:
            self._on_packet(connection.rank, packet)

    def _greet(self, connection: Connection, hello: dict[str, Any]) -> None:
        rank: Any = hello.get("rank")
        if (why := refusal(hello, self._job, self._me, len(self._lookups))) is not None:
            warn_once("elastic: refused", why)
            self._forget(connection)
            return
        before = self._open.get(rank)
        if self._past.get(rank) == hello.get("life"):
            if before is None:  # it was lost for good; else it is the same process once more
                connection.send(Packet({"is": "drop", "on": self.goes_on}))
                self._hear_of_the_others(rank, hello)
            self._forget(connection)
            return
        self._past[rank] = str(hello.get("life"))
        connection.peer, connection.rank = hello, rank
        self._dialler.end(connection)
        answer(connection, hello, self._hello)
        if before is not None:  # a new process has its number: of the old one nothing was heard yet
            self._gone(before)
        if self._unsure.pop(rank, None) is not None:  # the new one listens where it did
            self._on_down(rank, True, False)
        self._open.add(rank, connection)
        self._on_up(rank)

    def _hear_of_the_others(self, rank: int | None, head: dict[str, Any]) -> None:
        """A worker that was lost, as when the network was cut in two, is there again; it may go on without this one."""
        if rank is not None and head.get("on") and self._open.get(rank) is None:
            self.left_behind = True
            self._on_down(rank, False, True)

    # ---- beats, dialling, loss --------------------------------------------------------------------------------

    def _look_after(self) -> None:
        for late in self._open.strangers.late():
            self._forget(late)
        now = time.monotonic()
        paused = self._silence.paused(self._open.all(), now)
        for connection in self._open.all():
            if why := self._silence.why_lost(connection, now, paused):
                get_logger().warning("worker %s %s: given up", connection.rank, why)
                self._drop(connection)
            elif self._silence.is_silent(connection, now) and self._is_dead(int(connection.rank or 0), connection):
                self._gone(connection)  # the end of its socket does not get through
            elif connection.has_more():
                self._watch(connection)
            elif now - connection.said > self._options.beat_every:
                connection.send(Packet({"is": "beat"}))
        for rank in set(range(self._me)) - set(self._open.ranks()):
            if (overdue := self._dialler.overdue(rank, now)) is not None:
                self._forget(overdue)
            if (dialled := self._dialler.dial(rank, now)) is not None:
                self._selector.register(dialled.socket, selectors.EVENT_WRITE, dialled)
        for rank, connection in list(self._unsure.items()):
            near = connection.peer.get("place") == self._hello["place"]  # elsewhere it takes time to find out
            asks = near or now - connection.heard < 10 * self._options.suspect_after
            if asks and self._is_dead(rank, connection):
                del self._unsure[rank]
                self._on_down(rank, True, False)

    def _watch(self, connection: Connection) -> None:
        writes = connection.rings is None and connection.has_more()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: Connection | None) -> None:
        if connection is not None and not connection.closed:
            connection.send(Packet({"is": "drop"}))
            connection.meant = True
            self._gone(connection)

    def _forget(self, connection: Connection) -> None:
        self._open.strangers.forget(connection)
        self._dialler.end(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    def _gone(self, connection: Connection) -> None:
        rank, was_open = connection.rank, self._open.end(connection)
        self._forget(connection)
        if rank is None or not was_open:
            return
        if time.monotonic() < connection.doubtful_until:
            connection.meant = connection.dropped = True
        dead = connection.left or self._is_dead(rank, connection)
        if not dead:
            self._unsure[rank] = connection
        self._on_down(rank, dead, connection.dropped and not connection.left)

    def _is_dead(self, rank: int, connection: Connection) -> bool:
        return is_gone(connection.peer, str(self._hello["place"]), connection.meant, self._lookups[rank])
