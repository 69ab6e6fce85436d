"""What parameter servers do for a checkpoint: each writes its shards to the common folder, and reads its rows back.

The functions with a ``table`` run in the servers' processes, as jobs (``server.background_jobs``): up to each ``yield``
between two requests, what they yield in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.checkpoint import dcp, files
from tfstyle_dist.parameter_server.persistence.table_state import copy_slots
from tfstyle_dist.parameter_server.server.table import VariableTable

_BYTES_AT_A_TIME = 64 << 20
Steps = Iterator[Callable[[], None]]


def write_shards(table: VariableTable, folder: str, part: str, entries: Sequence[Mapping[str, Any]]) -> Steps:
    """Writes variables and their slots, each variable as it is at one moment.

    Args:
        table: of the server.
        folder: of the checkpoint that is being written.
        part: beginning of the names of this server's parts in it.
        entries: for each shard its ``number``, first row ``start``, the name of its ``value`` or ``None``, and under
            ``slots`` lists of optimizer, slot, name, and whether it is divided like the variable; ``shape`` is the
            whole variable's.
    """
    made = 0
    for pieces in _bundles(table, entries):
        yield lambda pieces=pieces, name=f"{part}-{made}": _write_part(Path(folder), name, pieces)  # type: ignore[misc]
        made += 1
    yield lambda: files.write_atomically(Path(folder) / f"{part}.json", json.dumps({"parts": made}))


def _bundles(table: VariableTable, entries: Sequence[Mapping[str, Any]]) -> Iterator[list[dcp.Piece]]:
    pieces: list[dcp.Piece] = []
    for entry in entries:
        pieces += _copies(table, entry)
        if sum(piece.tensor.nbytes for piece in pieces) >= _BYTES_AT_A_TIME:
            yield pieces
            pieces = []
    if pieces:
        yield pieces


def _copies(table: VariableTable, entry: Mapping[str, Any]) -> Iterator[dcp.Piece]:
    stored = table.variable(entry["number"])
    shape, start = tuple(entry["shape"]), entry["start"]
    if entry["value"] is not None:
        yield dcp.Piece(entry["value"], stored.parameter.detach().clone(), start, shape)
    slots = copy_slots(table, stored) if entry["slots"] else {}
    for rule, slot, name, divided in entry["slots"]:
        tensor = slots[rule][slot]
        if divided:
            yield dcp.Piece(name, tensor, start, shape)
        elif start == 0:
            yield dcp.Piece(name, tensor, 0, tuple(tensor.shape))


def _write_part(folder: Path, name: str, pieces: Sequence[dcp.Piece]) -> None:
    part = folder / name
    dcp.write_pieces(part, pieces)
    dcp.finish_part(part, {}, {})


def read_shards(table: VariableTable, folder: str, entries: Sequence[Mapping[str, Any]]) -> Steps:
    """Puts saved rows and values into variables and slots.

    Args:
        table: of the server.
        folder: with the tensors of the checkpoint.
        entries: ``number``, ``rule`` and ``slot`` (or ``None`` for the variable's value), and the ``name``, ``shape``
            and ``dtype`` of the saved tensor with the first row ``start`` and the number of ``rows`` to take, ``None``
            for all; or a ``literal``. Without a ``number``: the optimizer's ``settings``.
    """
    for entry in entries:
        found: list[Any] = [entry.get("literal")]
        if "name" in entry:

            def read(entry: Mapping[str, Any] = entry, found: list[Any] = found) -> None:
                rows = None if entry["rows"] is None else (entry["start"], entry["rows"])
                found[0] = dcp.read_rows(Path(folder), entry["name"], entry["shape"], entry["dtype"], rows)

            yield read
        if "settings" in entry:
            table.rules[entry["rule"]].put_settings({"common": entry["settings"]})
        elif entry["rule"] is None:
            stored = table.variable(entry["number"])
            stored.begin_write()
            with torch.no_grad():
                stored.parameter.copy_(found[0])
            stored.end_write()
        else:
            parameter = table.variable(entry["number"]).parameter
            table.rules[entry["rule"]].put_slots(parameter, {entry["slot"]: found[0]})
        table.calls += 1
