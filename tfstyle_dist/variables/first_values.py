"""Every worker begins with the first one's values, after the models were compared."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core import element_types, sparse_parts
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.variables.record import Living, Placement, Record, raw

_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")
BYTES_PER_MESSAGE = 250 * 1024 * 1024
_STRUCTURE = "model structure"
_MADE_HERE = (
    "This worker has a module, a parameter or a buffer that the others have not made, as where a step makes it for "
    "what it finds in its share of the batch. Make it on all workers. A copy that is kept and not trained, such as the "
    "best model so far, may be each worker's own: freeze it before it is kept, as in self.best = "
    "copy.deepcopy(self.model).requires_grad_(False)."
)


def has_sums(dtype: torch.dtype) -> bool:
    """Whether elements of a type can be added, and sent between workers; not those of float8, uint16 and the like."""
    return dtype in element_types.COMMON


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as something that can be sent: of a type without sums, its bytes."""
    return tensor if has_sums(tensor.dtype) else bytes_of(tensor)


def of_the_same_structure(group: WorkerGroup, pending: list[Record]) -> Living:
    """Compares the parameters, buffers and variables that were created on all workers; collective.

    What a program has let go may wait for the garbage collector on some workers and be gone on others. So where
    workers differ it is collected on all of them, and what is left is compared.

    Args:
        group: the workers.
        pending: in the order of creation.

    Returns:
        Those that live on all workers, and stay as long as the result.

    Raises:
        CollectiveMismatchError: they differ; the message says where.
    """
    living = Living(pending)
    if _difference(group, living) is None:
        return living
    del living
    gc.collect()
    living = Living(pending)
    if (error := _difference(group, living)) is not None:
        raise error
    return living


def _difference(group: WorkerGroup, pending: Sequence[Record]) -> CollectiveMismatchError | None:
    # Keras' paths number the layers of a process, which may have built others before: their last part says enough.
    mine = [
        [r.kind, r.local_name.rpartition("/")[2], list(r.components[0].shape), _kind_of(r.components[0])]
        for r in pending
    ]
    try:
        group.agree(json.dumps(mine), _STRUCTURE)
    except CollectiveMismatchError as error:
        if not all(call.startswith(_STRUCTURE) for call in error.calls):  # another worker did something else altogether
            error.add_note(f"[tfstyle_dist] {_MADE_HERE}")
            raise
        everyone = [json.loads(c.removeprefix(_STRUCTURE).rpartition(" at ")[0]) for c in error.calls]
        first = everyone[0]
        for rank, other in enumerate(everyone):
            for place, (a, b) in enumerate(zip_longest(first, other)):
                if a != b:
                    return CollectiveMismatchError(
                        f"The workers built different models: entry {place} in the order of creation is {a} on worker "
                        f"0 but {b} on worker {rank} ({len(first)} and {len(other)} entries in all). Build the same "
                        "model on every worker.",
                        error.calls,
                    )
        raise
    return None


def _kind_of(tensor: torch.Tensor) -> str:
    if tensor.layout is torch.strided:
        return str(tensor.dtype)
    dimensions = f" of {tensor.sparse_dim()} sparse dimensions" if tensor.layout is torch.sparse_coo else ""
    return f"{tensor.dtype} {tensor.layout}{dimensions}"


def is_own_statistic(record: Record) -> bool:
    """Whether it is one of the statistics of a layer, such as BatchNorm, that a replica made in its turn.

    Those stay its own, as those of other layers. All other buffers begin again with the first replica's values: a
    projection that is drawn, or a code book, must be the same where the parameters around it are trained together.
    """
    if record.maker is None or record.module is None or record.local_name not in _STATISTICS:
        return False
    return hasattr(record.module(), _STATISTICS[0])


def in_messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, in parts that hold little more than ``BYTES_PER_MESSAGE``: each is copied for a while."""
    part, size = [], 0
    for tensor in tensors:
        part.append(tensor)
        size += tensor.nbytes
        if size >= BYTES_PER_MESSAGE:
            yield part
            part, size = [], 0
    if part:
        yield part


def send_first_values(group: WorkerGroup, pending: Sequence[Record]) -> None:
    """Gives all workers the first one's values, in flat broadcasts for each dtype and device; collective.

    The statistics of a layer that a worker made in a step stay its own.

    Args:
        group: the workers.
        pending: the same on all of them.
    """
    with_values = [r for r in pending if not r.components[0].is_meta]  # Keras infers shapes with such
    for record in with_values:
        if sparse_parts.is_sparse(record.components[0]):
            send_sparse(group, record.components[0], f"initial values of {record.local_name!r}")
    by_type = _dense_by_type(with_values)
    own = {id(record.components[0]) for record in with_values if is_own_statistic(record)}
    with torch.no_grad(), raw():
        for (dtype, _, divided), tensors in by_type.items():
            send = group.broadcast_part if divided else group.broadcast
            for some in in_messages(tensors):
                flat = torch.cat([t.detach().reshape(-1) for t in some])
                send(sendable(flat), 0, f"initial values ({dtype})")
                for tensor, value in zip(some, flat.split([t.numel() for t in some]), strict=True):
                    if id(tensor) not in own:
                        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                            tensor.copy_(value.view(tensor.shape))
        for record in pending:
            if record.kind == "variable":
                record.fan_out()


def _dense_by_type(records: Sequence[Record]) -> dict[tuple[torch.dtype, torch.device, bool], list[torch.Tensor]]:
    """The first copies of dense tensors, by dtype, device and whether workers hold parts of them."""
    by_type: dict[tuple[torch.dtype, torch.device, bool], list[torch.Tensor]] = {}
    for record in records:
        first, divided = record.components[0], record.placement is Placement.SHARDED
        if not sparse_parts.is_sparse(first):
            by_type.setdefault((first.dtype, first.device, divided), []).append(first)
    return by_type


def send_sparse(group: WorkerGroup, tensor: torch.Tensor, name: str) -> None:
    """Gives all workers the first one's sparse tensor, whose number of elements may be another one; collective.

    Args:
        group: the workers.
        tensor: of one shape and layout on all of them; it is written in place.
        name: of the call.
    """
    parts = [part.contiguous() for part in sparse_parts.parts_of(tensor)]
    told = [sparse_parts.about(tensor), [list(p.shape) for p in parts]] if group.rank == 0 else None
    description, shapes = group.gather_objects(told, name)[0]
    if group.rank:
        parts = [part.new_empty(shape) for part, shape in zip(parts, shapes, strict=True)]
    for part in parts:
        if part.numel():
            group.broadcast(part, 0, name)
    if group.rank:
        sparse_parts.fill(tensor, sparse_parts.assemble(description, parts))
