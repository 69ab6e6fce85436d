"""The thread that gives functions to workers, takes their results and notices when one is lost."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.closures import Closure, ClosureQueue
from tfstyle_dist.core.errors import CancelledError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_AGAIN,
    FLAG_KEEP,
    FLAG_NO_VALUE,
    HEADER_SIZE,
    Header,
    Kind,
    ProtocolError,
    unpack_error,
    unpack_json,
)
from tfstyle_dist.parameter_server.protocol.peer_loop import Bell
from tfstyle_dist.parameter_server.transports import zeromq_sockets

IN_FLIGHT = 2
_ALIVE_EVERY = 1.0


class _Link:
    """The connection to one task."""

    def __init__(self, context: Any, name: str, address: str) -> None:
        self.context, self.name, self.address = context, name, address
        self.socket: Any = None
        self.monitor: Any = None
        self.ready = self.ever = self.up = False
        self.refused, self.failures = False, 0
        self.incarnation = ""
        self.functions: set[int] = set()
        self.resources: set[int] = set()
        self.values: set[int] = set()  # results that the task should have
        self.running: dict[int, Closure] = {}

    def open(self) -> None:
        """Connects under a new identity: nothing that was meant for an earlier connection can come."""
        self.socket, self.monitor = self.context.connect(self.address, b"p" + uuid.uuid4().bytes)
        self.ready = self.up = False

    def close(self) -> None:
        """Closes the connection; what was not sent yet is dropped."""
        zeromq_sockets.close_link(self.socket, self.monitor)


class _DisplacedError(UnavailableError):
    """The tasks work for another coordinator."""


class WorkerPool:
    """Runs the calls of a queue on the worker tasks.

    Args:
        context: sockets and keys.
        workers: addresses of the worker tasks.
        servers: addresses of the ps tasks; they are told that this process lives.
        hello: what each task is told at first.
        queue: the calls.
        functions: pickled functions by number.
        resources: pickled factories of per-worker resources by number.
        in_flight: how many calls a worker has at a time, the one it runs included.
    """

    def __init__(
        self,
        context: zeromq_sockets.Context,
        workers: Sequence[str],
        servers: Sequence[str],
        hello: Mapping[str, Any],
        queue: ClosureQueue,
        functions: Mapping[int, Sequence[Any]],
        resources: Mapping[int, Sequence[Any]],
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._context, self._in_flight = context, in_flight
        self._snapshots: dict[str, Any] | None = hello.get("snapshots")
        self._hello, self._queue, self._functions, self._resources = dict(hello), queue, functions, resources
        self._workers = [_Link(context, f"/job:worker/task:{i}", a) for i, a in enumerate(workers)]
        self._servers = [_Link(context, f"/job:ps/task:{i}", a) for i, a in enumerate(servers)]
        self._bell = Bell()
        self._stopping = False
        self._farewell: Sequence[_Link] = self._workers  # who is told that it is over
        self._poller: Any = None
        self._thread = threading.Thread(target=self._main, name="tfstyle-coordinator", daemon=True)
        self._thread.start()

    # ---- from other threads -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to do."""
        self._bell.ring()

    def absent(self) -> str:
        """Says which workers are not there; empty when all are."""
        missing = [f"{w.name} at {w.address}" for w in self._workers if not w.ready]
        if not missing:
            return ""
        which = "No worker is there" if len(missing) == len(self._workers) else "Some workers are not there"
        return f" {which}: {', '.join(missing)}. Start them (again); functions go on as soon as one is back."

    def stop(self, goodbye: bool = True) -> None:
        """Ends the thread.

        Args:
            goodbye: also tells the workers to end.
        """
        self._stop(self._workers if goodbye else ())

    def leave(self) -> None:
        """Ends the thread, the tasks and the links, for a program that ends and has lost its strategy."""
        self._stop([*self._workers, *self._servers])
        self._context.close()

    def _stop(self, farewell: Sequence[_Link]) -> None:
        if self._stopping:
            return
        self._farewell, self._stopping = farewell, True
        self.wake()
        self._thread.join(30)
        if not self._thread.is_alive():
            self._bell.close()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        over: BaseException = CancelledError("This coordinator was closed; functions that had not ended are cancelled.")
        try:
            for link in (*self._workers, *self._servers):
                link.open()
            self._loop()
        except _DisplacedError as error:
            get_logger().warning("%s", error)
            over, self._farewell = UnavailableError(str(error)), ()  # the tasks are the other one's
        except BaseException as error:
            get_logger().exception("the coordinator's thread failed")
            over = error
        finally:
            # The program must not wait for a dead thread.
            self._queue.end(over, [closure for link in self._workers for closure in link.running.values()])
            for link in (*self._workers, *self._servers):
                if link.socket is not None:
                    if link in self._farewell and link.ready:
                        link.socket.linger = 1000
                        link.socket.send(messages.plain(Kind.GOODBYE))
                        link.socket.disable_monitor()
                        link.monitor.close(0)
                        link.socket.close()
                    else:
                        link.close()

    def _new_poller(self) -> None:
        links = (*self._workers, *self._servers)
        self._poller = zeromq_sockets.poller(
            self._bell.file, *(s for link in links for s in (link.socket, link.monitor))
        )
        self._sockets = {link.socket: link for link in links}
        self._monitors = {link.monitor: link for link in links}

    def _loop(self) -> None:
        self._new_poller()
        alive = time.monotonic()
        while not self._stopping:
            for entry, _ in self._poller.poll(500):
                if entry == self._bell.file:
                    self._bell.heard()
                elif entry in self._sockets:
                    self._take(self._sockets[entry])
                elif entry in self._monitors:
                    self._news(self._monitors[entry])
            self._dispatch()
            if time.monotonic() - alive > _ALIVE_EVERY:
                alive = time.monotonic()
                finished = messages.finished(self._queue.low_water(), *self._queue.unfinished())
                for link in (*self._workers, *self._servers):
                    if link.ready:
                        link.socket.send(messages.plain(Kind.ALIVE) if link in self._workers else finished)

    def _news(self, link: _Link) -> None:
        while (event := zeromq_sockets.news(link.monitor)) is not None:
            if event == "up":
                link.failures, link.up = 0, True
                link.socket.send(messages.plain(Kind.HELLO, {**self._hello, "address": link.address}))
            elif event == "down" and link.up:
                self._lose(link)
                return
            elif not link.refused:
                link.failures += 1
                if event != "refused" and link.failures < zeromq_sockets.MOST_FAILURES:
                    continue
                link.refused = True
                error = UnavailableError(f"{link.name} at {link.address} refuses this program's key (TFSTYLE_PS_KEYS).")
                get_logger().warning("%s", error)
                if link in self._workers and all(w.refused for w in self._workers):
                    self._queue.fail_all(error)

    def _lose(self, link: _Link) -> None:
        """A task is gone, or its connection is: what it had is given to others."""
        if link.ready and link in self._servers:
            waits = "functions that need it wait until it is started again" if self._snapshots else "functions fail"
            get_logger().warning("%s at %s is lost; %s", link.name, link.address, waits)
        elif link.ready:
            get_logger().warning(
                "%s at %s is lost; %d functions go elsewhere", link.name, link.address, len(link.running)
            )
        link.close()
        lost = list(link.running.values())
        link.running.clear()
        link.open()
        self._new_poller()
        if lost:
            self._queue.put_back(lost)

    def _take(self, link: _Link) -> None:
        for _ in range(64):
            try:
                parts = messages.receive(link.socket, zeromq_sockets.DONTWAIT)
            except zeromq_sockets.Again:
                return
            try:
                header = Header.unpack(parts[0])
                meta = memoryview(parts[0])[HEADER_SIZE:]
                if header.closure == 0:
                    self._introduced(link, header, meta)
                    continue
            except ProtocolError as error:
                get_logger().warning("%s at %s breaks the protocol: %s", link.name, link.address, error)
                self._lose(link)
                return
            self._ended(link, header, meta, parts[1:])

    def _ended(self, link: _Link, header: Header, meta: memoryview, frames: Sequence[bytes]) -> None:
        """A worker has run a call."""
        closure = link.running.get(header.closure)
        if closure is None or closure.attempt != header.attempt:
            return
        del link.running[header.closure]
        if header.flags & FLAG_NO_VALUE:
            link.values.difference_update(v.number for v in closure.values)
        if header.flags & (FLAG_AGAIN | FLAG_NO_VALUE):
            self._queue.put_back([closure])
            return
        if header.flags & FLAG_KEEP:
            link.values.add(closure.number)
        try:
            value = messages.value_of(byte_streams.join(messages.numbers(meta), frames))
            if header.kind is not Kind.OK and not isinstance(value, BaseException):
                raise ProtocolError(f"a {type(value).__name__} came in place of an error")
        except Exception as error:
            self._queue.fail(closure, RuntimeError(f"The result of a function cannot be read here: {error!r}"))
            return
        if header.kind is Kind.OK:
            self._queue.finish(closure, value, link.running.values())
        else:
            self._queue.fail(closure, value)

    def _introduced(self, link: _Link, header: Header, meta: Any) -> None:
        if header.kind is Kind.ERROR:
            error = unpack_error(meta, link.name)
            if isinstance(error, CancelledError):
                raise _DisplacedError(
                    f"{link.name} at {link.address} works for another coordinator now: a second chief program, or a "
                    "second ParameterServerStrategy, was started for the same tasks. This coordinator has ended. Give "
                    "each program tasks of its own."
                )
            get_logger().warning("%s does not work for this program: %s", link.name, error)
            return
        told = unpack_json(meta)
        incarnation = str(told.get("incarnation"))
        if incarnation != link.incarnation:
            if link.ever:
                get_logger().warning("%s at %s is back", link.name, link.address)
            if link.ever and link in self._servers and not told.get("restored"):
                self._queue.fail_all(self._empty_server(link))
            link.incarnation = incarnation
            link.functions.clear()
            link.resources.clear()
            link.values.clear()
        link.ready = link.ever = True

    def _empty_server(self, link: _Link) -> UnavailableError:
        if self._snapshots:
            folder = self._snapshots["folder"]
            why = f"it found no snapshot of this program in {folder}. Is that folder on a disk it sees?"
        else:
            why = (
                "nothing had been kept. Start the program again from a checkpoint; under ParameterServerStrategy(..., "
                "snapshot_folder=FOLDER) a server that is started again goes on from its snapshots."
            )
        return UnavailableError(f"{link.name} at {link.address} was started again without its variables: {why}")

    def _dispatch(self) -> None:
        """Gives each free worker a call, until all are busy or nothing waits."""
        given = True
        while given:
            given = False
            for index, link in enumerate(self._workers):
                if link.ready and len(link.running) < self._in_flight:
                    closure = self._queue.take(index)
                    if closure is not None:
                        try:
                            self._give(link, closure)
                        except Exception as error:  # e.g. a result among its arguments that cannot be sent
                            link.running.pop(closure.number, None)
                            self._queue.fail(closure, error)
                        given = True

    def _give(self, link: _Link, closure: Closure) -> None:
        for number in self._resources.keys() - link.resources:
            messages.send(link.socket, messages.call({"method": "resource", "number": number}, self._resources[number]))
            link.resources.add(number)
        if closure.function not in link.functions:
            parts = self._functions[closure.function]
            messages.send(link.socket, messages.call({"method": "function", "number": closure.function}, parts))
            link.functions.add(closure.function)
        for value in closure.values:
            if value.number not in link.values:
                parts = messages.parts_of(value.get())
                messages.send(link.socket, messages.call({"method": "value", "number": value.number}, parts))
                link.values.add(value.number)
        link.running[closure.number] = closure
        low_water = self._queue.low_water()
        flags = FLAG_KEEP if self._queue.is_wanted(closure) else 0
        messages.send(
            link.socket,
            messages.run(closure.number, closure.attempt, low_water, closure.function, closure.parts, flags),
        )
