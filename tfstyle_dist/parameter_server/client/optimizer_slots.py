"""The state of ``torch.optim`` optimizers, which servers hold: ``state_dict`` gets it, ``load_state_dict`` sends it."""

from __future__ import annotations

import base64
import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.parameter_server.client import server_functions
from tfstyle_dist.parameter_server.client.push import Servers
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord, Shard
from tfstyle_dist.parameter_server.server import slots as on_server

_AT_A_TIME = 4 << 20  # bytes in an answer
_stays = contextvars.ContextVar("stays", default=False)


@contextlib.contextmanager
def state_stays_there() -> Iterator[None]:
    """``state_dict`` and ``load_state_dict`` are about the groups alone: a checkpoint's tensors go another way."""
    token = _stays.set(True)
    try:
        yield
    finally:
        _stays.reset(token)


def stays_there() -> bool:
    """Whether the calling code is inside of ``state_stays_there``."""
    return _stays.get()


def begins_with_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has state before the servers hear of it; Adagrad's own beginning they make themselves."""
    made = [state for state in optimizer.state.values() if state]
    if isinstance(optimizer, torch.optim.Adagrad):
        made = [state for state in made if float(state.get("step", 0))]
    return bool(made)


def send(
    servers: Servers,
    rule: int,
    parameters: Sequence[tuple[RemoteRecord, torch.Tensor]],
    state: Mapping[Any, Mapping[str, Any] | None],
) -> None:
    """Gives the state of some parameters to the servers, which forget what they had.

    Args:
        servers: of the parameters.
        rule: number of the optimizer.
        parameters: with their records.
        state: by parameter; one that is not in it begins anew.
    """
    by_server: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for record, parameter in parameters:
        slots = state.get(parameter) or {}
        for shard in record.shards:
            part = {name: _part(value, parameter, shard) for name, value in slots.items()}
            by_server.setdefault(shard.server, []).append((shard.number, part))
    jobs = [
        server_functions.start(servers, server, on_server.take_slots, rule, batch)
        for server, entries in by_server.items()
        for batch in server_functions.in_batches(entries)
    ]
    server_functions.wait(servers, jobs)


def counted_in_groups(servers: Servers, rule: int, record: RemoteRecord) -> list[dict[str, Any]]:
    """The numbers of each group, in which a rule may count.

    Args:
        servers: of the parameters.
        rule: number of the optimizer.
        record: of one of them; its first server is asked.
    """
    told = server_functions.call(servers, record.shards[0].server, on_server.describe_slots, rule, [])
    groups: list[dict[str, Any]] = told["settings"]["groups"]
    return groups


def check_whole(record: RemoteRecord, parts: Sequence[Mapping[str, Any]]) -> None:
    """Looks whether the shards of a parameter have the same slots.

    Args:
        record: of the parameter.
        parts: the slots of each shard, by name.

    Raises:
        RuntimeError: some have others: a first step is being made, and a part would look like the whole, or like none.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise RuntimeError(
            f"Only some of the {len(parts)} shards of {record.describe()!r} have made a first step, so its optimizer "
            "has no whole state yet. Save it, or call state_dict(), after coordinator.join()."
        )


def _part(value: Any, parameter: torch.Tensor, shard: Shard) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or not value.ndim:
        return value.detach().clone()
    return value.detach()[shard.start : shard.start + shard.rows].clone()


def fetch(servers: Servers, rule: int, record: RemoteRecord) -> dict[str, Any]:
    """What the servers keep for one parameter, whole, by name.

    Args:
        servers: of the parameter.
        rule: number of the optimizer.
        record: of the parameter.

    Raises:
        RuntimeError: some of its shards have no state yet.
    """
    parts = []
    for shard in record.shards:
        about = server_functions.call(servers, shard.server, on_server.describe_slots, rule, [shard.number])["slots"]
        slots = about.get(str(shard.number), {})
        parts.append({name: _slot(servers, rule, shard, name, entry) for name, entry in slots.items()})
    check_whole(record, parts)
    whole, found = record.components[0].shape, dict[str, Any]()
    for name, first in parts[0].items():
        divided = isinstance(first, torch.Tensor) and whole and first.shape == (record.shards[0].rows, *whole[1:])
        found[name] = torch.cat([part[name] for part in parts]) if divided and len(parts) > 1 else first
    return found


def _slot(servers: Servers, rule: int, shard: Shard, name: str, about: dict[str, Any]) -> Any:
    if "shape" not in about:
        return about["value"]
    dtype = getattr(torch, about["dtype"])
    size, data = math.prod(about["shape"]) * torch.empty((), dtype=dtype).element_size(), bytearray()
    while len(data) < size:
        args = rule, shard.number, name, len(data), min(_AT_A_TIME, size - len(data))
        data += base64.b64decode(server_functions.call(servers, shard.server, on_server.give_bytes, *args)["bytes"])
    if not size:
        return torch.empty(about["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(about["shape"])
