"""The thread that gives functions to workers, takes their results and runs those of a lost one elsewhere.

That a worker is lost says ``Peer.news`` (``parameter_server/protocol/peer_loop.py``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.closure_queue import ClosureQueue
from tfstyle_dist.coordinator.task_link import Task
from tfstyle_dist.core.errors import CancelledError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.protocol import byte_streams, zeromq_sockets
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
    unpack_numbers,
)
from tfstyle_dist.parameter_server.protocol.peer_loop import News, Peer, PeerLoop

IN_FLIGHT = 2
_ALIVE_EVERY = 1.0
_GOODBYE_MS = 1000
"""So long a goodbye may take to be sent."""


class _DisplacedError(UnavailableError):
    """The tasks work for another coordinator."""


class WorkerPool:
    """Runs the calls of a queue on the worker tasks.

    Args:
        context: sockets and keys.
        workers: addresses of the worker tasks.
        servers: addresses of the ps tasks; they are told that this process lives.
        handshake: what each task is told at first.
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
        handshake: Mapping[str, Any],
        queue: ClosureQueue,
        functions: Mapping[int, Sequence[Any]],
        resources: Mapping[int, Sequence[Any]],
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._context, self._in_flight = context, in_flight
        self._snapshots: dict[str, Any] | None = handshake.get("snapshots")
        self._handshake, self._queue, self._functions, self._resources = dict(handshake), queue, functions, resources
        self._workers = [Task(f"/job:worker/task:{i}", a) for i, a in enumerate(workers)]
        self._servers = [Task(f"/job:ps/task:{i}", a) for i, a in enumerate(servers)]
        self._stopping = False
        self._told_goodbye: Sequence[Task] = self._workers  # who is told that it is over
        self._loop = PeerLoop()
        self._thread = threading.Thread(target=self._main, name="tfstyle-coordinator", daemon=True)
        self._thread.start()

    # ---- from other threads -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to do."""
        self._loop.wake()

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
        """Ends the thread, and the tasks of workers and servers, for a program that ends and has lost its strategy."""
        self._stop([*self._workers, *self._servers])
        self._context.close()

    def _stop(self, told_goodbye: Sequence[Task]) -> None:
        if self._stopping:
            return
        self._told_goodbye, self._stopping = told_goodbye, True
        self.wake()
        self._thread.join(30)
        if not self._thread.is_alive():
            self._loop.close()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        over: BaseException = CancelledError("This coordinator was closed; functions that had not ended are cancelled.")
        try:
            for task in (*self._workers, *self._servers):
                self._open(task)
            self._run()
        except _DisplacedError as error:
            get_logger().warning("%s", error)
            over, self._told_goodbye = UnavailableError(str(error)), ()  # the tasks are the other one's
        except BaseException as error:
            get_logger().exception("the coordinator's thread failed")
            over = error
        finally:
            # The program must not wait for a dead thread.
            self._queue.end(over, [closure for task in self._workers for closure in task.running.values()])
            for task in (*self._workers, *self._servers):
                if task.peer is not None:
                    ends = task in self._told_goodbye and task.ready
                    if ends:
                        task.socket.send(messages.plain(Kind.GOODBYE))
                    task.peer.close(_GOODBYE_MS if ends else 0)

    def _open(self, task: Task) -> None:
        task.peer, task.ready = Peer(self._context, task.address, b"p"), False
        self._loop.add_peer(task.peer, partial(self._take, task), partial(self._take_news, task))

    def _run(self) -> None:
        alive = time.monotonic()
        while not self._stopping:
            self._loop.turn(500)
            self._dispatch()
            if time.monotonic() - alive > _ALIVE_EVERY:
                alive = time.monotonic()
                finished = messages.finished(self._queue.low_water(), *self._queue.unfinished())
                for task in (*self._workers, *self._servers):
                    if task.ready:
                        task.socket.send(messages.plain(Kind.ALIVE) if task in self._workers else finished)
        end = time.monotonic() + _GOODBYE_MS / 1000  # a short program ends before a task that is late has answered
        with contextlib.suppress(_DisplacedError):  # by one of these; the others are still ours
            while any(not (task.ever or task.refused) for task in self._told_goodbye) and time.monotonic() < end:
                self._loop.turn(50)

    def _take_news(self, task: Task) -> None:
        assert task.peer is not None
        while (news := task.peer.news()) is not None:
            if news is News.UP:
                task.socket.send(messages.plain(Kind.HANDSHAKE, {**self._handshake, "address": task.address}))
            elif news is News.LOST:
                self._lose(task)
                return
            elif not task.refused:
                task.refused = True
                error = UnavailableError(f"{task.name} at {task.address} refuses this program's key (TFSTYLE_PS_KEYS).")
                get_logger().warning("%s", error)
                if task in self._workers and all(w.refused for w in self._workers):
                    self._queue.fail_all(error)

    def _lose(self, task: Task) -> None:
        """A task is gone, or its connection is: what it had is given to others."""
        if task.ready and task in self._servers:
            waits = "functions that need it wait until it is started again" if self._snapshots else "functions fail"
            get_logger().warning("%s at %s is lost; %s", task.name, task.address, waits)
        elif task.ready:
            get_logger().warning(
                "%s at %s is lost; %d functions go elsewhere", task.name, task.address, len(task.running)
            )
        assert task.peer is not None
        self._loop.remove_peer(task.peer)
        task.peer.close()
        lost = list(task.running.values())
        task.running.clear()
        self._open(task)
        if lost:
            self._queue.put_back(lost)

    def _take(self, task: Task) -> None:
        for _ in range(64):
            try:
                parts = messages.receive(task.socket, zeromq_sockets.DONTWAIT)
            except zeromq_sockets.Again:
                return
            try:
                header = Header.unpack(parts[0])
                meta = memoryview(parts[0])[HEADER_SIZE:]
                if header.closure == 0:
                    self._introduced(task, header, meta)
                    continue
            except ProtocolError as error:
                get_logger().warning("%s at %s breaks the protocol: %s", task.name, task.address, error)
                self._lose(task)
                return
            self._ended(task, header, meta, parts[1:])

    def _ended(self, task: Task, header: Header, meta: memoryview, frames: Sequence[bytes]) -> None:
        """A worker has run a call."""
        closure = task.running.get(header.closure)
        if closure is None or closure.attempt != header.attempt:
            return
        del task.running[header.closure]
        if header.flags & FLAG_NO_VALUE:
            task.values.difference_update(v.number for v in closure.values)
        if header.flags & (FLAG_AGAIN | FLAG_NO_VALUE):
            self._queue.put_back([closure])
            return
        if header.flags & FLAG_KEEP:
            task.values.add(closure.number)
        try:
            value = messages.value_of(byte_streams.join(unpack_numbers(meta), frames))
            if header.kind is not Kind.OK and not isinstance(value, BaseException):
                raise ProtocolError(f"a {type(value).__name__} came in place of an error")
        except Exception as error:
            self._queue.fail(closure, RuntimeError(f"The result of a function cannot be read here: {error!r}"))
            return
        if header.kind is Kind.OK:
            self._queue.finish(closure, value, task.running.values())
        else:
            self._queue.fail(closure, value)

    def _introduced(self, task: Task, header: Header, meta: Any) -> None:
        if header.kind is Kind.ERROR:
            error = unpack_error(meta, task.name)
            if isinstance(error, CancelledError):
                raise _DisplacedError(
                    f"{task.name} at {task.address} works for another coordinator now: a second chief program, or a "
                    "second ParameterServerStrategy, was started for the same tasks. This coordinator has ended. Give "
                    "each program tasks of its own."
                )
            get_logger().warning("%s does not work for this program: %s", task.name, error)
            return
        told = unpack_json(meta)
        incarnation = str(told.get("incarnation"))
        if incarnation != task.incarnation:
            if task.ever:
                get_logger().warning("%s at %s is back", task.name, task.address)
            if task.ever and task in self._servers and not told.get("restored"):
                self._queue.fail_all(self._empty_server(task))
            task.incarnation = incarnation
            task.forget()
        task.ready = task.ever = True

    def _empty_server(self, task: Task) -> UnavailableError:
        if self._snapshots:
            folder = self._snapshots["folder"]
            why = f"it found no snapshot of this program in {folder}. Is that folder on a disk it sees?"
        else:
            why = (
                "nothing had been kept. Start the program again from a checkpoint; under ParameterServerStrategy(..., "
                "snapshot_folder=FOLDER) a server that is started again goes on from its snapshots."
            )
        return UnavailableError(f"{task.name} at {task.address} was started again without its variables: {why}")

    def _dispatch(self) -> None:
        """Gives each free worker a call, until all are busy or nothing waits."""
        given = True
        while given:
            given = False
            for index, task in enumerate(self._workers):
                if task.ready and len(task.running) < self._in_flight:
                    closure = self._queue.take(index)
                    if closure is not None:
                        try:
                            task.give(
                                closure,
                                self._functions,
                                self._resources,
                                self._queue.low_water(),
                                self._queue.is_wanted(closure),
                            )
                        except Exception as error:  # e.g. a result among its arguments that cannot be sent
                            task.running.pop(closure.number, None)
                            self._queue.fail(closure, error)
                        given = True
