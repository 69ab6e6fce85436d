"""The clients of one server, and the coordinator's session that it works for: who is admitted, displaced, forgotten."""

from __future__ import annotations

import time
import uuid
from typing import Any

from tfstyle_dist.core.errors import CancelledError, UnavailableError
from tfstyle_dist.parameter_server.protocol.handshake import Tokens
from tfstyle_dist.parameter_server.protocol.header import ProtocolError
from tfstyle_dist.parameter_server.server.batches import Batches, refusal
from tfstyle_dist.parameter_server.server.calls import ServerState
from tfstyle_dist.parameter_server.transports.client_session import ClientSession
from tfstyle_dist.shm.namespaces import sharing_id

_SILENT_SECONDS = 5.0
"""A coordinator tells every second that it lives; one that has not for so long is taken for dead."""


class Sessions:
    """All methods are called with the server's lock held.

    Args:
        name: of the task, for messages.
        state: of the server.
        tokens: of its clients.

    Attributes:
        clients: those that have introduced themselves, by the identity of their ZeroMQ connection.
        batches: what they send.
    """

    def __init__(self, name: str, state: ServerState, tokens: Tokens) -> None:
        self._name, self._state, self._tokens = name, state, tokens
        self.clients: dict[bytes, ClientSession] = {}
        self.batches = Batches(state, self.forget)
        self._incarnation = uuid.uuid4().hex
        self._heard: float | None = None
        self._former: set[str] = set()  # sessions that a newer one has displaced

    def note_sign_of_life(self) -> None:
        """The coordinator lives."""
        self._heard = time.monotonic()

    def seconds_of_silence(self) -> float:
        """How long nothing was heard of the coordinator; 0 if there was none yet."""
        return 0.0 if self._heard is None else time.monotonic() - self._heard

    def introduce(self, client: ClientSession, meta: dict[str, Any]) -> dict[str, Any]:
        """Admits a client.

        Args:
            client: the client.
            meta: what it says of itself.

        Returns:
            What the server says of itself.

        Raises:
            ProtocolError: it has no role here.
            UnavailableError: it cannot be admitted now.
            CancelledError: the server works for another coordinator.
        """
        role, session = str(meta.get("role")), str(meta.get("session"))
        if role not in ("coordinator", "worker"):
            raise ProtocolError(f"unknown role {role!r}")
        if role == "worker" and not self._state.session:
            raise UnavailableError(f"{self._name} has not heard from a coordinator yet.")
        if session in self._former or (role == "worker" and session != self._state.session):
            raise self._displaced()
        if role == "coordinator":
            if session != self._state.session:
                self._check_snapshots(meta.get("snapshots"))
                self._displace(client)
                self._state.begin_session(session, meta.get("snapshots"))
            self.note_sign_of_life()
        client.role, client.name = role, str(meta.get("task"))[:200]
        self._forget_earlier(client)
        return {
            "incarnation": self._incarnation, "task": self._name, "host": sharing_id(),
            "restored": self._state.restored, "empty": not self._state.table.variables,
        }  # fmt: skip

    def _check_snapshots(self, wanted: dict[str, Any] | None) -> None:
        """A new coordinator deletes the snapshots in its folder: they must not be those of one that is at work.

        Raises:
            UnavailableError: they are.
        """
        keeper = self._state.keeper
        lives = self._heard is not None and self.seconds_of_silence() < _SILENT_SECONDS
        if lives and wanted is not None and keeper is not None and keeper.keeps_in(str(wanted["folder"])):
            raise UnavailableError(
                f"{self._name} works for a coordinator that lives and keeps its snapshots in {wanted['folder']!r}; a "
                "second one would delete them. End the first program, or give this one a snapshot_folder and tasks of "
                "its own."
            )

    def _displace(self, newer: ClientSession) -> None:
        """Ends the work for the coordinator before: it and its workers are told."""
        if self._state.session:
            self._former.add(self._state.session)
        for other in list(self.clients.values()):
            if other is not newer:
                self.batches.send(other, other.channel, [refusal(0, self._displaced())])
                self.forget(other)

    def _displaced(self) -> CancelledError:
        return CancelledError(f"{self._name} works for another coordinator now.")

    def _forget_earlier(self, client: ClientSession) -> None:
        """A task that was started again, or connects anew: what its earlier link had is not needed."""
        for other in list(self.clients.values()):
            if other is not client and (other.role, other.name) == (client.role, client.name):
                self.forget(other)

    def forget(self, client: ClientSession) -> None:
        """A client is gone: its shared memory and what it used in place are free."""
        self.clients.pop(client.identity, None)
        client.drop_segment()
        self.batches.drop(client)
        self._state.table.shared.leave(client.column)
        client.column, client.role = -1, ""
        self._tokens.forget(client)
        if client.connection is not None:
            client.connection.end()
