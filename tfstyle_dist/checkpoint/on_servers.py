"""Tensors of a checkpoint that live on parameter servers: asking the servers to write and to read them.

Values and optimizer slots never pass through the coordinator. Saved under one name each, as whole tensors of several
chunks, they can be restored to another number of servers, and to and from plain modules and optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.checkpoint import shards
from tfstyle_dist.parameter_server.client import server_functions
from tfstyle_dist.parameter_server.client.local_copies import placeholder
from tfstyle_dist.parameter_server.client.optimizer_slots import check_whole
from tfstyle_dist.parameter_server.client.push import Servers
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.server.slots import describe_slots
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.variables import find_record


@dataclass(frozen=True)
class Source:
    """Where the value of a tensor of a checkpoint is.

    Attributes:
        record: the variable or parameter.
        rule: number of the optimizer whose slot it is; ``None``: the variable's own value.
        slot: name of the slot.
        divided: whether it is divided over the servers like the variable.
    """

    record: RemoteRecord
    rule: int | None = None
    slot: str = ""
    divided: bool = True


def source_of(tensor: Any) -> Source | None:
    """Where a tensor's value is; ``None``: in this process."""
    known = getattr(tensor, "_tfstyle_source", None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    record = find_record(tensor) if isinstance(tensor, torch.Tensor) else None
    return Source(record) if isinstance(record, RemoteRecord) else None


def strategy_of(tensors: Sequence[torch.Tensor]) -> ParameterServerStrategy | None:
    """The strategy on whose servers some tensors live, if they do."""
    for tensor in tensors:
        record = find_record(tensor)
        if isinstance(record, RemoteRecord):
            record.store.ensure_equal()
            found = record.store.strategy
            assert isinstance(found, ParameterServerStrategy)
            return found
    return None


def _servers_of(record: RemoteRecord) -> Servers:
    store: Any = record.store
    store.ensure_equal()
    servers: Servers = store.servers
    return servers


# ---- optimizers ---------------------------------------------------------------------------------------------------


def read_slots(
    strategy: ParameterServerStrategy, rule: int, records: Sequence[RemoteRecord]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The slots that an optimizer has for some tensors, and what it has beside them.

    Args:
        strategy: the tensors'.
        rule: number of the optimizer.
        records: the tensors.

    Returns:
        For each record its slots by name, tensors as stand-ins that only a checkpoint can read; the settings.

    Raises:
        RuntimeError: some shards of a tensor have no state yet.
    """
    by_server: dict[int, list[int]] = {}
    for shard in (shard for record in records for shard in record.shards):
        by_server.setdefault(shard.server, []).append(shard.number)
    described: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for server, numbers in by_server.items():
        for batch in server_functions.in_batches(numbers):
            told = server_functions.call(strategy.servers, server, describe_slots, rule, batch)
            described.update(told["slots"])
            settings = settings or told["settings"] or {}
    found = []
    for record in records:
        parts = [described.get(str(shard.number), {}) for shard in record.shards]
        check_whole(record, parts)
        found.append(_stand_ins(record, rule, parts[0]))
    return found, settings


def _stand_ins(record: RemoteRecord, rule: int, described: Mapping[str, Any]) -> dict[str, Any]:
    whole = tuple(record.components[0].shape)
    first = (record.shards[0].rows, *whole[1:]) if whole else ()
    slots: dict[str, Any] = {}
    for name, about in described.items():
        if "shape" not in about:
            slots[name] = about["value"]
            continue
        shape = tuple(about["shape"])
        divided = shape == first
        slots[name] = placeholder(whole if divided else shape, getattr(torch, about["dtype"]))
        slots[name]._tfstyle_source = Source(record, rule, name, divided)
    return slots


# ---- saving -------------------------------------------------------------------------------------------------------


def write(folder: Path, sources: Mapping[str, Source]) -> list[str]:
    """Has the servers write their shards into the folder of a checkpoint; returns when they have.

    Args:
        folder: on a disk that the servers see.
        sources: by name.

    Returns:
        The names of the parts they wrote.
    """
    groups: dict[int, tuple[Servers, dict[int, dict[int, dict[str, Any]]]]] = {}
    for name, source in sources.items():
        servers = _servers_of(source.record)
        by_server = groups.setdefault(id(servers), (servers, {}))[1]
        shape = list(source.record.components[0].shape)
        for shard in source.record.shards:
            entry = by_server.setdefault(shard.server, {}).setdefault(
                shard.number, {"number": shard.number, "start": shard.start, "shape": shape, "value": None, "slots": []}
            )
            if source.rule is None:
                entry["value"] = name
            else:
                entry["slots"].append((source.rule, source.slot, name, source.divided))
    parts = []
    for place, (servers, by_server) in enumerate(groups.values()):
        jobs = []
        for server, entries in by_server.items():
            for number, batch in enumerate(server_functions.in_batches(list(entries.values()))):
                part = f"server-{place}-{server}-{number}"
                jobs.append(server_functions.start(servers, server, shards.write_shards, str(folder), part, batch))
                parts.append(part)
        server_functions.wait(servers, jobs)
    return parts


# ---- restoring ----------------------------------------------------------------------------------------------------


class Restore:
    """Collects what servers are to read from a checkpoint.

    Args:
        folder: with the tensors; on a disk that the servers see.
        facts: shape and dtype of each saved tensor.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._facts = folder, facts
        self._entries: dict[int, tuple[Servers, dict[int, list[dict[str, Any]]]]] = {}

    def tensor(self, name: str, source: Source) -> None:
        """A saved tensor goes to a variable or slot."""
        facts, whole = self._facts[name], list(source.record.components[0].shape)
        divided = list(facts["shape"]) == whole and bool(whole)
        about = {"name": name, "shape": list(facts["shape"]), "dtype": facts["dtype"]}
        for shard in source.record.shards:
            rows = {"start": shard.start, "rows": shard.rows if divided else None}
            self._add(source, shard.server, {**about, **rows, "number": shard.number})

    def literal(self, value: Any, source: Source) -> None:
        """A value that is no tensor goes to a slot."""
        for shard in source.record.shards:
            self._add(source, shard.server, {"number": shard.number, "literal": value})

    def settings(self, strategy: ParameterServerStrategy, rule: int, settings: Any) -> None:
        """What an optimizer has beside its slots, on every server."""
        for server in range(len(strategy.servers.links)):
            entries = self._entries.setdefault(id(strategy.servers), (strategy.servers, {}))[1]
            entries.setdefault(server, []).append({"rule": rule, "settings": settings})

    def _add(self, source: Source, server: int, entry: dict[str, Any]) -> None:
        servers = _servers_of(source.record)
        entries = self._entries.setdefault(id(servers), (servers, {}))[1]
        entries.setdefault(server, []).append({**entry, "rule": source.rule, "slot": source.slot})

    def run(self) -> None:
        """Has the servers read; returns when they have."""
        for servers, by_server in self._entries.values():
            jobs = [
                server_functions.start(servers, server, shards.read_shards, str(self._folder), batch)
                for server, entries in by_server.items()
                for batch in server_functions.in_batches(entries)
            ]
            server_functions.wait(servers, jobs)
