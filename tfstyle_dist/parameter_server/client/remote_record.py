"""What a process knows of a tensor on the servers: its shards, its local copy, and which part goes where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation, dtype_number
from tfstyle_dist.variables.content.parameter_marks import address_of
from tfstyle_dist.variables.function_calls import give_values_to_functions
from tfstyle_dist.variables.record import Record, raw


@dataclass(frozen=True, slots=True)
class Shard:
    """Some rows of a tensor on one server.

    Attributes:
        number: of the variable on the server; no other in the cluster has it.
        server: task index of the server.
        start: first row.
        rows: how many; a scalar has one.
        offset: of its first element in the whole tensor.
        numel: number of its elements.
    """

    number: int
    server: int
    start: int
    rows: int
    offset: int
    numel: int


class RemoteRecord(Record):
    """What a process knows of one tensor on the servers; ``components[0]`` is its local copy.

    Attributes:
        shards: where its rows are.
        versions: of the shards in the local copy; 0: never pulled.
        created: the servers have it; before, the local copy is what counts.
        fixed: the local copy must stay the same object (a parameter or buffer of a module on a worker).
        stamp: the step in which the local copy was pulled.
        key: number of the tensor in the cluster.
    """

    __slots__ = (
        "baseline", "created", "fixed", "key", "leased", "looked_up", "pulled_as", "put_back", "shards", "stamp",
        "table", "versions", "written",
    )  # fmt: skip

    def __init__(self, *args: Any, key: int, shards: Sequence[Shard], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        give_values_to_functions(self.store)
        self.key, self.shards = key, tuple(shards)
        self.forget()
        self.created = self.fixed = False
        self.stamp = -1
        self.written = False  # by this process since it was pulled
        self.table = False  # workers pull only the rows they use
        self.looked_up = -1  # the step in which rows of it were picked
        self.leased: Any = None  # whose memory the local copy is, if it is the server's own
        self.baseline: torch.Tensor | None = None  # the value when it was pulled, where changes of it are looked for
        self.pulled_as: tuple[int, Any] = (0, None)  # version and address of the local copy when it was pulled
        self.put_back = False  # a function wrote to it and put the old value back

    def forget(self) -> None:
        """The local copy may be another value than the servers': the next pull brings theirs."""
        self.versions = [0] * len(self.shards)

    def read(self) -> torch.Tensor:
        """The local copy, fresh enough for the calling context."""
        servers: Any = self.store.servers  # type: ignore[attr-defined]
        if self.created and (torch.is_inference_mode_enabled() or torch_internals.transforms_are_active()):
            # The copy is kept, and later steps train with it.
            with torch_internals.outside_of_transforms(), torch.inference_mode(False), torch.no_grad():
                servers.read(self)
        elif self.created:
            servers.read(self)
        return self.components[0]

    def fan_out(self) -> None:
        """After somebody wrote into the local copy outside of a step: the servers take it over."""
        if self.created:
            servers: Any = self.store.servers  # type: ignore[attr-defined]
            servers.write(self, Op.ASSIGN, self.components[0].detach())

    def set_trainable(self, trainable: bool) -> None:
        """``requires_grad_``, of which the workers learn with the next function."""
        super().set_trainable(trainable)
        self.store.retold += 1  # type: ignore[attr-defined]

    def settle(self, watched: bool) -> None:
        """The local copy is what the servers have, or will have when they have taken what was sent.

        Args:
            watched: keep its value, to find what a function changes in it.
        """
        local = self.components[0]
        self.baseline = local.detach().clone() if watched else None
        if self.fixed:
            self.pulled_as = torch_internals.version_of(local), address_of(local)

    def home_of_alias(self, base: torch.Tensor) -> torch.Tensor:
        """The same copy; if it is not the newest, it gets the newest one's values, as long as there are servers."""
        if self.store.strategy is not None and not self.store.strategy.closed:
            with raw(), torch.no_grad():
                if (newest := self.read()) is not base and not torch.equal(newest, base):
                    base.copy_(newest)
        return base

    def write_through(self, base: torch.Tensor) -> None:
        """Somebody wrote into the memory of a local copy: the servers take it over."""
        with raw(), torch.no_grad():
            if self.components[0] is not base:
                self.components[0].copy_(base)
            self.fan_out()

    def set_data(self, data: torch.Tensor) -> None:
        """``tensor.data = data``: the servers take the value over."""
        local = self.components[0]
        if data.shape != local.shape or (data.dtype != local.dtype and self.created):
            raise TypeError(
                f"{self.describe()!r} is a {local.dtype} of shape {tuple(local.shape)} on the parameter servers and "
                f"cannot become a {data.dtype} of shape {tuple(data.shape)}. Convert the module in the scope in "
                "which it is built, before it is used."
            )
        self.store.note_memory_of(self, data)  # type: ignore[attr-defined]
        with raw(), torch.no_grad():
            local.data = data.detach().contiguous()
        self.fan_out()


def parts_by_shard(record: RemoteRecord, whole: torch.Tensor) -> list[tuple[Shard, torch.Tensor]]:
    """For each shard its elements of a contiguous tensor of the record's shape."""
    if len(record.shards) == 1:
        return [(record.shards[0], whole)]
    flat = whole.view(-1)
    return [(shard, flat[shard.offset : shard.offset + shard.numel]) for shard in record.shards]


def by_shard(
    record: RemoteRecord, rows: torch.Tensor, every: bool = False
) -> Iterable[tuple[Shard, torch.Tensor | None, torch.Tensor]]:
    """For each shard with some of the rows: their positions, and their numbers inside the shard.

    Args:
        record: the tensor.
        rows: int64 row numbers; they may repeat.
        every: shards with none of the rows as well.

    Raises:
        InvalidArgumentError: a number out of range.
    """
    rows = rows.detach().to(torch.int64).contiguous().view(-1)
    if len(record.shards) == 1:
        yield record.shards[0], None, rows  # its server refuses what is out of range
        return
    count = record.shards[-1].start + record.shards[-1].rows
    low, high = (int(number) for number in torch.aminmax(rows)) if rows.numel() else (0, 0)
    if low < 0 or high >= count:
        raise InvalidArgumentError(
            f"Row numbers {low}..{high} do not fit variable {record.describe()!r} of {count} rows: give numbers from 0 "
            f"to {count - 1}."
        )
    for shard in record.shards:
        positions = ((rows >= shard.start) & (rows < shard.start + shard.rows)).nonzero().view(-1)
        if every or len(positions):
            yield shard, positions, rows[positions] - shard.start


def gradient_parts(
    record: RemoteRecord, grad: torch.Tensor, near: bool, dtype: torch.dtype
) -> Iterable[tuple[Shard, Operation, list[torch.Tensor]]]:
    """The operations that push a gradient, without number of write and optimizer, and their data.

    Args:
        record: the tensor.
        grad: dense or sparse.
        near: the servers are on this host: rows that are named twice may go twice.
        dtype: of the elements on the way.
    """
    number = dtype_number(dtype)
    if grad.is_sparse:
        grad = grad if near else grad.coalesce()
        rows, values = torch_internals.indices_of(grad)[0], torch_internals.values_of(grad).to(dtype)
        # A shard without rows makes the step as well: it counts steps, and momentum moves rows that have no gradient.
        for shard, positions, ids in by_shard(record, rows, every=True):
            part = (values if positions is None else values[positions]).contiguous()
            yield shard, Operation(Op.GRADIENT_ROWS, number, shard.number, 0, ids.numel(), part.nbytes), [ids, part]
        return
    if not grad.is_cpu or grad.dtype is not dtype:
        grad = grad.to("cpu", dtype)
    for shard, part in parts_by_shard(record, grad.detach().contiguous()):
        yield shard, Operation(Op.GRADIENT, number, shard.number, 0, 0, part.nbytes), [part]
