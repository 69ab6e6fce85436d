"""Buffers of modules in a function of a worker: what the function changes in them is added on the servers.

Parameters must stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.variables.content.discovery import Discovery
from tfstyle_dist.variables.known_tensors import find_record

Place = tuple[torch.nn.Module, str, RemoteRecord, torch.Tensor]
"""A module, the name of its buffer or parameter, the record of that, and the tensor itself."""


class _Writing(Protocol):
    def write(self, record: RemoteRecord, op: Op, value: torch.Tensor) -> None:
        """Assigns to a tensor on the servers, or adds to it."""

    def assign_elements(self, record: RemoteRecord, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Assigns to some elements."""


def places_of(function: Any, arguments: Iterable[Any]) -> list[Place]:
    """Where the modules that a function uses hold buffers and parameters that are on the servers.

    Args:
        function: what was scheduled.
        arguments: its arguments.
    """
    modules: dict[torch.nn.Module, None] = {}

    def take(value: Any, _: object) -> bool:
        if isinstance(value, torch.nn.Module):
            modules.update(dict.fromkeys(value.modules()))
            return True
        return False

    Discovery(take, classes=False).look(function, arguments)
    found = []
    for module in modules:
        for held in (torch_internals.buffers_of(module), torch_internals.parameters_of(module)):
            for name, tensor in held.items():
                record = find_record(tensor)
                if isinstance(record, RemoteRecord) and tensor is not None:
                    found.append((module, name, record, tensor))
    return found


def check_parameters_are_there(places: Sequence[Place]) -> None:
    """A function that puts another parameter into a module, as ``load_state_dict(assign=True)`` does, loses it.

    Args:
        places: before the function ran.

    Raises:
        RuntimeError: it has done that; the module has its own again.
    """
    for module, name, record, tensor in places:
        held = torch_internals.parameters_of(module)
        if record.kind != "buffer" and held.get(name) is not tensor:
            held[name] = cast("torch.nn.Parameter", tensor)
            raise RuntimeError(
                f"A scheduled function put another tensor in the place of the parameter {name!r} of "
                f"{type(module).__name__}, which lives on parameter servers: that would be lost. Change parameters in "
                "the coordinator's program, after join()."
            )


def take_over(places: Sequence[Place]) -> None:
    """``self.mean = 0.9 * self.mean + ...`` puts a new tensor in a buffer's place: the buffer gets its values.

    Args:
        places: before the function ran.

    Raises:
        RuntimeError: a buffer is gone, or has another shape or type.
    """
    for module, name, record, _ in places:
        held, local = torch_internals.buffers_of(module), record.components[0]
        now = held.get(name)
        if now is local or record.kind != "buffer":
            continue
        if now is None or now.shape != local.shape or now.dtype != local.dtype:
            what = "nothing" if now is None else f"a {now.dtype} of shape {tuple(now.shape)}"
            raise RuntimeError(
                f"A scheduled function made {what} of the buffer {name!r} of {type(module).__name__}, which is a "
                f"{local.dtype} of shape {tuple(local.shape)} on the parameter servers. Change its values only."
            )
        with torch.no_grad():
            local.copy_(now)
        held[name] = local


def push_buffers(servers: _Writing, records: Iterable[RemoteRecord]) -> None:
    """Adds what a function changed in its local copies of buffers to the servers' values.

    Args:
        servers: that hold them.
        records: of all that the function could reach.

    Raises:
        RuntimeError: a buffer has got another shape.
    """
    for record in records:
        local, baseline = record.components[0], record.baseline
        # BatchNorm changes its statistics without counting a version, so the values are compared.
        if record.kind != "buffer" or baseline is None or torch.equal(local, baseline):
            continue
        if local.shape != baseline.shape:
            found = tuple(local.shape)
            with contextlib.suppress(RuntimeError):  # memory that numpy shares cannot be resized
                local.resize_(baseline.shape).copy_(baseline)
            raise RuntimeError(
                f"A scheduled function gave the buffer {record.local_name!r} the shape {found}; on the parameter "
                f"servers it has {tuple(baseline.shape)}, and keeps that. Give it its size before: call the module "
                "once on an example of a batch before it comes into strategy.scope(), or make it as large in __init__."
            )
        _push(servers, record, local.detach(), baseline)


def _push(servers: _Writing, record: RemoteRecord, local: torch.Tensor, baseline: torch.Tensor) -> None:
    """What others add meanwhile stays; an element that no sum brings to its value, as from infinity, is assigned."""
    is_bool = local.dtype is torch.bool
    if not is_bool and torch.equal(baseline + (delta := local - baseline), local):
        servers.write(record, Op.ADD, delta)
        return
    assigned = changed = ~_is_same(baseline, local)
    if not is_bool:
        nothing = torch.zeros_like(local)
        delta = torch.where(changed, local - baseline, nothing)
        # From 1e9 to 0.5 a difference of float32 leads to 0: what is missing then is added after it.
        lost = changed & ~_is_same(baseline + delta, local)
        rest = torch.where(lost, local - (baseline + delta), nothing)
        assigned = (lost & ~_is_same(baseline + delta + rest, local)) | (changed & ~local.isfinite())
        for added in (delta, rest):
            added = torch.where(assigned, nothing, added)
            if added.any():
                servers.write(record, Op.ADD, added)
    if assigned.any():
        numbers = assigned.reshape(-1).nonzero().view(-1)
        servers.assign_elements(record, numbers, local.reshape(-1)[numbers])


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found == wanted) | (found.isnan() & wanted.isnan())
