"""What comes between two snapshots, as records: calls that change what a table holds, and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.persistence.record_files import read_what_is_whole
from tfstyle_dist.parameter_server.persistence.table_state import repeat_writes
from tfstyle_dist.parameter_server.protocol.header import Header, Kind, pack_json, unpack_json
from tfstyle_dist.parameter_server.protocol.operations import (
    FLAG_DUPLICATE,
    WRITES,
    Operation,
    pack_operations,
    request_bytes,
    tensor_bytes,
    unpack_operations,
)
from tfstyle_dist.parameter_server.server.table import VariableTable

Call = Callable[[dict[str, Any], Sequence[Any]], Any]


def call_record(meta: dict[str, Any], parts: Sequence[Any]) -> list[Any]:
    """A call."""
    return [b"call", pack_json({key: value for key, value in meta.items() if key != "sizes"}), *parts]


def batch_record(
    header: Header, operations: Sequence[Operation], answers: Sequence[Operation], data: torch.Tensor
) -> list[Any]:
    """The writes of a batch, with the version that each has made; empty if it made none."""
    if not any(o.op in WRITES for o in operations):
        return []
    kept, pieces, offset = [], [], 0
    for operation, answer in zip(operations, answers, strict=True):
        size = request_bytes(operation)
        if operation.op in WRITES and not answer.extra & FLAG_DUPLICATE:
            versioned = answer.argument << 24 | operation.argument & 0xFFFFFF
            kept.append(
                Operation(
                    operation.op, operation.dtype, operation.variable, versioned,
                    operation.rows, operation.nbytes, operation.extra,
                )
            )  # fmt: skip
            pieces.append(tensor_bytes(data[offset : offset + size]))
        offset += size
    if not kept:
        return []
    head = Header(Kind.BATCH, 0, header.closure, header.low_water, header.attempt).pack()
    return [b"batch", head, pack_operations(kept), b"".join(pieces)]


def replay(path: Path, table: VariableTable, call: Call) -> None:
    """Makes the calls and writes of a journal once more.

    Args:
        path: of the file.
        table: the state.
        call: carries out a call of the coordinator.
    """
    try:
        for record in read_what_is_whole(path):
            try:
                _replay_record(table, record, call)
            except Exception as error:
                get_logger().error(
                    "a record of journal %s cannot be used, and what it kept is lost: %s: %s", path.name,
                    type(error).__name__, error,
                )  # fmt: skip
    except PermissionError as error:
        get_logger().error("journal %s is not used: %s", path.name, error)


def _replay_record(table: VariableTable, record: Sequence[bytes], call: Call) -> None:
    kind, *parts = record or [b""]
    if kind == b"call" and parts:
        call(unpack_json(parts[0]), parts[1:])
    elif kind == b"batch" and len(parts) == 3:
        _replay_batch(table, *parts)
    else:
        raise DataLossError(f"it is neither a call nor a batch, but {kind[:40]!r} with {len(parts)} part(s)")


def _replay_batch(table: VariableTable, head: bytes, operations: bytes, data: bytes) -> None:
    header = Header.unpack(head)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    kept, pieces, versions, offset = [], [], {}, 0
    told = unpack_operations(operations)
    if sum(map(request_bytes, told)) != len(data):
        raise DataLossError(f"a batch that needs {sum(map(request_bytes, told))} bytes was kept with {len(data)}")
    for operation in told:
        size = request_bytes(operation)
        stored = table.variables.get(operation.variable)
        version, operation.argument = operation.argument >> 24, operation.argument & 0xFFFFFF
        if stored is not None and version > stored.version:
            kept.append(operation)
            pieces.append(buffer[offset : offset + size])
            versions[operation.variable] = version
        offset += size
    if not kept:
        return
    repeat_writes(table, header, kept, torch.cat(pieces))
    for variable, version in versions.items():
        table.variables[variable].version = version
