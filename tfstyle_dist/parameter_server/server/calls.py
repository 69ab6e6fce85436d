"""What one parameter server holds, and the calls that ask for it or change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfstyle_dist.core.errors import NotFoundError
from tfstyle_dist.parameter_server.persistence.snapshots import SnapshotKeeper
from tfstyle_dist.parameter_server.persistence.table_state import add_rule
from tfstyle_dist.parameter_server.protocol import byte_streams, call_fields, pickling
from tfstyle_dist.parameter_server.protocol.call_fields import NewVariable
from tfstyle_dist.parameter_server.protocol.header import ProtocolError
from tfstyle_dist.parameter_server.server.background_jobs import Jobs
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.parameter_server.server.told_settings import ToldSettings
from tfstyle_dist.parameter_server.transports.client_session import ClientSession
from tfstyle_dist.parameter_server.transports.transfer_segment import TransferSegment


class ServerState:
    """Variables, jobs and snapshots of one server; all methods are called with its lock held.

    Args:
        name: of the task, for messages, e.g. ``"/job:ps/task:0"``.

    Attributes:
        session: of the coordinator that it works for.
        restored: whether it came back from snapshots.
    """

    def __init__(self, name: str) -> None:
        self._name, self.session = name, ""
        self.table, self.jobs = VariableTable(), Jobs()
        self.keeper: SnapshotKeeper | None = None
        self.restored = False

    def begin_session(self, session: str, snapshots: dict[str, Any] | None) -> None:
        """Works for a coordinator from now on; if this process was started again, with what the one before had."""
        self.stop_keeping(forget=False)
        self.table.shared.close()
        self.session, self.table, self.jobs = "", VariableTable(), Jobs()
        self.restored = False
        if snapshots is not None:
            task = int(self._name.rpartition(":")[2])
            keeper = SnapshotKeeper(snapshots, task, session, self.table, self.jobs)
            self.restored = keeper.restore(self.change)
            self.keeper = keeper
        self.session = session

    def stop_keeping(self, forget: bool) -> None:
        """Ends jobs and snapshots.

        Args:
            forget: the files of the snapshots are deleted.
        """
        self.jobs.close()
        if self.keeper is not None:
            self.keeper.close(forget)
            self.keeper = None

    # ---- calls ------------------------------------------------------------------------------------------------

    def call(self, client: ClientSession, meta: dict[str, Any], frames: list[bytes]) -> dict[str, Any]:
        """Carries out a call.

        Raises:
            PermissionError: a worker that makes a call of the coordinator.
            ProtocolError: there is no such method.
        """
        method = meta.get("method")
        if method == "segment":
            client.drop_segment()
            client.segment = TransferSegment.attach(meta)
            return {}
        if method == "leave":  # it stays, and sends by ZeroMQ from now on
            if client.connection is not None:
                client.connection.detach()
                client.connection = None
            return {}
        if method == "values":
            if client.column < 0 and client.connection is not None:  # its end will be noticed
                client.column = self.table.shared.join()
            return self.table.shared.describe(self.table.variables, client.column)
        if method == "fence":
            self.table.writes.fence(call_fields.number(meta, "closure"), call_fields.number(meta, "attempt"))
            return {}
        if client.role != "coordinator":
            raise PermissionError(f"Only the coordinator may call {method!r}.")
        parts = byte_streams.join(meta.get("sizes", []), frames)
        if method in ("apply", "job", "outcome"):
            return self._apply(method, meta, parts)
        self.change(meta, parts)
        if self.keeper is not None:
            self.keeper.note_call(meta, parts)
        return {}

    def statistics(self) -> dict[str, int]:
        """Counts of this moment."""
        return {
            "variables": len(self.table.variables), "applied": self.table.applied,
            "duplicates": self.table.writes.duplicates,
            "leases": self.table.shared.leases(), "functions": len(self.table.writes.by_function),
            "unsaved": int(self.keeper is not None and self.keeper.unsaved),
        }  # fmt: skip

    def _apply(self, method: str, meta: dict[str, Any], parts: Sequence[Any]) -> dict[str, Any]:
        """Functions of the coordinator on the table, e.g. those of checkpoints."""
        if method == "outcome":
            number = call_fields.number(meta, "number")
            ended, error = self.jobs.outcome(number)
            if ended and self.keeper is not None and self.keeper.unsaved:
                self.keeper.soon()
            if error is not None:
                raise error
            return {"ended": ended, "known": ended or self.jobs.is_active(number)}
        function, args = pickling.loads(parts)
        if method == "job":
            return {"number": self.jobs.start(function(self.table, *args))}
        result: dict[str, Any] = function(self.table, *args)
        return result

    def change(self, meta: dict[str, Any], parts: Sequence[Any]) -> None:
        """Calls that change what the table holds; a journal may repeat them."""
        method = meta.get("method")
        self.table.calls += 1
        if method == "create":
            wanted = call_fields.entries(meta, "variables")
            if len(wanted) != len(parts):
                raise ProtocolError(f"{len(wanted)} variables came with {len(parts)} parts")
            for new in [NewVariable.of(entry, part) for entry, part in zip(wanted, parts, strict=True)]:
                if new.value is None:
                    self.table.create_filled(new.number, new.name, new.shape, new.dtype, new.fill or ())
                else:
                    self.table.create(new.number, new.name, new.shape, new.dtype, new.value)
        elif method == "optimizer":
            add_rule(self.table, call_fields.number(meta, "number"), parts)
        elif method == "hyperparameters":
            if (number := call_fields.number(meta, "number")) not in self.table.rules:
                raise NotFoundError(f"This parameter server has no optimizer {number}.")
            groups, since = call_fields.entries(meta, "groups"), 0
            before = None if meta.get("before") is None else call_fields.entries(meta, "before")
            if before is not None:
                since = call_fields.number(meta, "since")
            told = self.table.told.setdefault(number, ToldSettings())
            told.tell(groups, before, since, self.table.writes.low_water)
            self.table.rule(number)
        else:
            raise ProtocolError(f"unknown method {method!r}")
