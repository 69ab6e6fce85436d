"""The process of one worker task: takes functions from the coordinator and runs them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.worker_session import Function, NoValueError, Session, error_parts, run_function
from tfstyle_dist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.protocol import byte_streams, call_fields, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_AGAIN,
    FLAG_KEEP,
    FLAG_NO_VALUE,
    HEADER_SIZE,
    Header,
    Kind,
    ProtocolError,
    pack_error,
    pack_message,
    unpack_json,
    unpack_numbers,
)
from tfstyle_dist.parameter_server.protocol.work import Work

_MOST_ATTEMPTS = 2
"""So often a function is run whose server does not answer in time: one that is always too slow is said."""


class WorkerTask:
    """Serves one worker task.

    Args:
        context: sockets and keys.
        address: ``host:port`` to listen at.
        job: name of the job.
        index: of the task.
        grace_seconds: seconds without a sign of life of the coordinator after which ``run`` gives up.
    """

    def __init__(
        self, context: zeromq_sockets.Context, address: str, job: str, index: int, grace_seconds: float
    ) -> None:
        self._name, self._index, self._grace_seconds = f"/job:{job}/task:{index}", index, grace_seconds
        self._socket = context.listen(address)
        self._incarnation = uuid.uuid4().hex
        self._coordinators: set[bytes] = set()
        self._session: Session | None = None
        self._former: set[str] = set()  # sessions that a newer one has displaced
        self._heard: float | None = None
        self._ended = False
        self._connections = zeromq_sockets.ConnectionCount(self._socket)
        self._alone_since: float | None = None
        self._early: list[list[bytes]] = []  # a message that was looked at while a function started

    def check(self) -> None:
        """Called by the thread that waits for this task, which may be stuck in a function that never returns.

        Raises:
            UnavailableError: no coordinator has been connected for too long.
        """
        if self._connections.count() > 0 or not self._connections.ever:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > self._grace_seconds:
            raise UnavailableError(f"{self._name} has had no coordinator for {self._grace_seconds:g} s and ends.")

    def run(self) -> None:
        """Runs functions until the coordinator says goodbye.

        Raises:
            UnavailableError: a coordinator was there, and then was silent for too long.
        """
        poller = zeromq_sockets.poller(self._socket)
        try:
            while not self._ended:
                if self._early or poller.poll(500):
                    parts = self._early.pop() if self._early else messages.receive(self._socket)
                    self._take(parts[0], parts[1:])
                elif self._heard is not None and time.monotonic() - self._heard > self._grace_seconds:
                    raise zeromq_sockets.silence(self._name, self._grace_seconds)
        finally:
            if self._session is not None:
                self._session.close()
            self._connections.close()
            self._socket.close(0)

    def _take(self, identity: bytes, parts: list[bytes]) -> None:
        header = None
        try:
            header = Header.unpack(parts[0])
            meta = memoryview(parts[0])[HEADER_SIZE:]
            if header.kind is Kind.HANDSHAKE:
                self._handshake(identity, unpack_json(meta))
                return
            if identity not in self._coordinators:
                raise ProtocolError("the first message must be the handshake of a coordinator")
            self._heard = time.monotonic()
            if header.kind is Kind.RUN:
                self._run(identity, header, unpack_numbers(meta), parts[1:])
                self._heard = time.monotonic()  # what it sent meanwhile is still in the queue
            elif header.kind is Kind.CALL:
                self._register(unpack_json(meta), parts[1:])
            elif header.kind is Kind.GOODBYE:
                self._ended = True
            elif header.kind is not Kind.ALIVE:
                raise ProtocolError(f"a worker does not take messages of kind {header.kind.name}")
        except Exception as error:
            get_logger().warning("%s refuses a message: %s", self._name, error)
            self._refuse(identity, error)

    def _refuse(self, identity: bytes, error: Exception) -> None:
        body = pack_error(error)
        self._send(identity, [pack_message(Header(Kind.ERROR, 0, meta_bytes=len(body)), body)])

    def _send(self, identity: bytes, parts: list[Any]) -> None:
        try:
            messages.send(self._socket, [identity, *parts])
        except zeromq_sockets.ZMQError:
            self._coordinators.discard(identity)  # that connection is gone; the coordinator has noticed

    def _handshake(self, identity: bytes, meta: dict[str, Any]) -> None:
        if meta.get("role") != "coordinator":
            raise ProtocolError(f"unknown role {meta.get('role')!r}")
        name = str(meta["session"])
        if name in self._former:
            raise self._displaced()
        if self._session is None or self._session.name != name:
            self._leave()
            self._session = Session(meta, self._name, self._index)
        self._coordinators.add(identity)
        self._heard = time.monotonic()
        self._send(identity, [messages.plain(Kind.OK, {"incarnation": self._incarnation, "task": self._name})])

    def _leave(self) -> None:
        """Ends the work for the coordinator before; that one waits for results, if it lives."""
        left, self._session = self._session, None
        if left is not None:
            self._former.add(left.name)
            for coordinator in list(self._coordinators):
                self._refuse(coordinator, self._displaced())
            self._coordinators.clear()
            left.close()

    def _displaced(self) -> CancelledError:
        return CancelledError(f"{self._name} works for another coordinator now.")

    def _register(self, meta: dict[str, Any], frames: list[bytes]) -> None:
        assert self._session is not None
        parts = byte_streams.join(meta.get("sizes"), frames)
        number, method = call_fields.number(meta, "number"), meta.get("method")
        if method == "function":
            self._session.functions.setdefault(number, Function(parts))
        elif method == "resource":
            self._session.factories.setdefault(number, parts)
        elif method == "value":
            self._session.values.put(number, parts)
        elif method == "settings":
            self._session.settings[number] = messages.value_of(parts)
        elif method == "dtype":
            torch.set_default_dtype(messages.value_of(parts))  # as it is in the coordinator's program
        else:
            raise ProtocolError(f"unknown method {method!r}")

    def _following(self) -> list[RemoteRecord]:
        """Parameters that the next function will pull, if it is here already."""
        assert self._session is not None
        try:
            self._early.append(messages.receive(self._socket, zeromq_sockets.DONTWAIT))
            identity, head = self._early[0][:2]
            header = Header.unpack(head)
            if header.kind is not Kind.RUN or identity not in self._coordinators or header.attempt > 1:
                return []
            function = self._session.functions.get(unpack_numbers(memoryview(head)[HEADER_SIZE:])[0])
        except (zeromq_sockets.Again, ProtocolError, ValueError, IndexError):
            return []  # none, or one that will be refused when it is its turn
        return [] if function is None else list(function.fixed)

    # ---- running ----------------------------------------------------------------------------------------------

    def _run(self, identity: bytes, header: Header, numbers: list[int], frames: list[bytes]) -> None:
        assert self._session is not None
        session, failed, flags, late = self._session, False, 0, False
        try:
            function = session.functions[numbers[0]]
            arguments = byte_streams.join(numbers[1:], frames)
            work = Work(header.closure, header.attempt, header.low_water)
            parts = messages.parts_of(run_function(session, function, work, arguments, self._following))
            if header.flags & FLAG_KEEP:
                session.values.put(header.closure, parts)
                flags |= FLAG_KEEP
        except BaseException as error:
            failed, parts = True, error_parts(error, self._name)
            late = isinstance(error, DeadlineExceededError) and header.attempt >= _MOST_ATTEMPTS
            flags |= FLAG_NO_VALUE if isinstance(error, NoValueError) else 0
        session.values.trim()
        # Even if the function did not notice: what it had written to that server may be lost.
        flags |= FLAG_AGAIN if session.strategy.servers.may_return and not late else 0
        self._send(identity, messages.result(header.closure, header.attempt, failed, parts, flags))
