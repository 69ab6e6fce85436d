"""State under logical names: full tensors and metadata, independent of workers and replicas.

What a checkpoint holds. ``train.Checkpoint`` will write it with ``torch.distributed.checkpoint``; anything that maps
names to tensors can carry it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.core.errors import NotFoundError
from tfstyle_dist.variables.store import find_record
from tfstyle_dist.variables.variable import Variable

VERSION = 1


@dataclass
class LogicalState:
    """Named full tensors.

    Attributes:
        tensors: one CPU tensor for each logical name.
        metadata: for each name its ``kind``, ``synchronization`` and ``aggregation``; under ``""`` the format's
        version.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)


def export_state(**objects: Variable | torch.nn.Module) -> LogicalState:
    """The state of some variables and modules.

    An ``ON_READ`` variable is stored as its cross-replica read, so this is collective over the workers; call it in
    cross-replica context on all of them.

    Args:
        **objects: variables and modules under the names that prefix theirs.

    Raises:
        ValueError: an ``ON_READ`` variable of aggregation NONE, which has no single value.

    Source: how ``tf.train.Checkpoint`` saves distributed variables.
    """
    state = LogicalState(metadata={"": {"version": VERSION}})
    for name, tensor in _named(objects):
        record = find_record(tensor)
        value = tensor.value() if isinstance(tensor, Variable) else _plain(tensor)
        state.tensors[name] = value.detach().to("cpu", copy=True)
        state.metadata[name] = {
            "kind": "tensor" if record is None else record.kind,
            "synchronization": None if record is None else record.synchronization.name,
            "aggregation": None if record is None else record.aggregation.name,
        }
    return state


def import_state(state: LogicalState, **objects: Variable | torch.nn.Module) -> None:
    """Puts stored values back, for any number of replicas: an ``ON_READ`` SUM variable is divided by the new number.

    Args:
        state: what ``export_state`` gave.
        **objects: variables and modules under the names they were stored with.

    Raises:
        NotFoundError: a name that was not stored.
        InvalidArgumentError: a stored value of another shape or dtype.
    """
    named = list(_named(objects))
    missing = [name for name, _ in named if name not in state.tensors]
    if missing:
        raise NotFoundError(f"The checkpoint has no {missing}; it holds {sorted(state.tensors)}.")
    for name, tensor in named:
        if isinstance(tensor, Variable):
            tensor.assign(state.tensors[name])
        else:
            with torch.no_grad():
                tensor.copy_(state.tensors[name])


def _named(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, entry in objects.items():
        if isinstance(entry, torch.nn.Module):
            for name, tensor in entry.state_dict(keep_vars=True).items():
                yield f"{prefix}/{name}", tensor
        elif isinstance(entry, torch.Tensor):
            yield prefix, entry
        else:
            raise TypeError(f"{prefix!r} is a {type(entry).__name__}; checkpoints hold variables and modules.")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    record = find_record(tensor)
    return tensor if record is None else record.components[0]
