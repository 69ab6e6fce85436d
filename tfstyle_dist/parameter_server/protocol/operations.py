"""What a client asks of the variables of a server: operations, as a table in the meta part of a message."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tfstyle_dist.core import element_types
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.parameter_server.protocol.header import ProtocolError

MAX_OPERATIONS = 1 << 15
ALIGNMENT = 16
MOST_COPIED = 1 << 30
"""So many bytes of rows, and of variables that are asked for again, one answer may have."""

_OPERATION = struct.Struct("<BBHIQQQ")

DTYPES = element_types.COMMON
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Op(enum.IntEnum):
    """What one operation of a batch does to one variable."""

    PULL = 1
    ASSIGN = 2
    ADD = 3
    SUB = 4
    GRADIENT = 5
    PULL_ROWS = 6
    ADD_ROWS = 7
    GRADIENT_ROWS = 8
    ASSIGN_ELEMENTS = 9


STEPS = frozenset({Op.GRADIENT, Op.GRADIENT_ROWS})
"""A server makes one step of each optimizer of all gradients in a batch: those of two steps travel in two."""

WRITES = STEPS | {Op.ASSIGN, Op.ADD, Op.SUB, Op.ADD_ROWS, Op.ASSIGN_ELEMENTS}

ROW_OPERATIONS = frozenset({Op.PULL_ROWS, Op.ADD_ROWS, Op.GRADIENT_ROWS, Op.ASSIGN_ELEMENTS})
"""Numbers come with these, of rows or of single elements."""

NARROWED = STEPS | {Op.PULL, Op.PULL_ROWS}

FLAG_UNCHANGED = 1
"""In the answer to a PULL: the client's copy is the newest, no data follows."""
FLAG_DUPLICATE = 2
"""In the answer to a write: an earlier attempt of the same closure made this write already."""


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a dtype on the wire."""
    try:
        return _DTYPE_NUMBERS[dtype]
    except KeyError:
        raise InvalidArgumentError(
            f"Variables of {dtype} cannot live on a parameter server; use one of {DTYPES}."
        ) from None


def padded(nbytes: int) -> int:
    """The room a tensor takes in the stream of a message."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def travels_as(op: int, dtype: torch.dtype, own: torch.dtype) -> bool:
    """Whether elements of a variable may travel with a dtype: pulls and gradients of float32 also as bfloat16."""
    return dtype is own or (op in NARROWED and dtype is torch.bfloat16 and own is torch.float32)


def has_steps(operations: Sequence[Operation]) -> bool:
    """Whether some of the operations are gradients."""
    return any(operation.op in STEPS for operation in operations)


@dataclass(slots=True)
class Operation:
    """One entry of a batch, or of the answer to one.

    Attributes:
        op: what to do.
        dtype: of the bytes.
        variable: number of the variable (shard).
        argument: PULL: the version the client has; writes: how many writes to this variable the closure made before.
        rows: number of rows of a sparse operation, or of the elements that are assigned.
        nbytes: size of the tensor's bytes, without padding; of a sparse operation: of the rows' values.
        extra: number of the optimizer of a gradient; flags of an answer.
    """

    op: int
    dtype: int
    variable: int
    argument: int = 0
    rows: int = 0
    nbytes: int = 0
    extra: int = 0

    @property
    def stream_bytes(self) -> int:
        """Its room in the stream: row numbers first, then values."""
        ids = padded(8 * self.rows) if self.op in ROW_OPERATIONS else 0
        return ids + padded(self.nbytes)


def request_bytes(operation: Operation) -> int:
    """How many bytes follow a request for one of its operations."""
    if operation.op == Op.PULL:
        return 0
    return operation.stream_bytes


class Lease(Protocol):
    """A value that stays as it is until it is released."""

    def release(self) -> None:
        """It is not used any more."""


class Source(Protocol):
    """A variable whose own memory an answer takes."""

    def lease(self) -> Lease | None:
        """The value as it is now, which later writes leave alone; ``None``: copy it."""


@dataclass(slots=True)
class Answer:
    """The result of a batch.

    Attributes:
        operations: its table.
        tensors: whose bytes follow, in order.
        sources: of each tensor the variable whose own memory it is; ``None``: it is a copy.
    """

    operations: list[Operation]
    tensors: list[torch.Tensor] = field(default_factory=list)
    sources: list[Source | None] = field(default_factory=list)


def pack_operations(operations: Sequence[Operation]) -> bytes:
    """The table of a batch."""
    return b"".join(
        _OPERATION.pack(o.op, o.dtype, o.extra, o.variable, o.argument, o.rows, o.nbytes) for o in operations
    )


def unpack_operations(meta: bytes | memoryview) -> list[Operation]:
    """The entries of a batch.

    Raises:
        ProtocolError: the table is cut off, too long, or names an unknown dtype.
    """
    count, rest = divmod(len(meta), _OPERATION.size)
    if rest or count > MAX_OPERATIONS:
        raise ProtocolError(f"a table of {len(meta)} bytes is no list of at most {MAX_OPERATIONS} operations")
    result = []
    for op, dtype, extra, variable, argument, rows, nbytes in _OPERATION.iter_unpack(meta):
        if dtype >= len(DTYPES):
            raise ProtocolError(f"unknown dtype number {dtype}")
        result.append(Operation(op, dtype, variable, argument, rows, nbytes, extra))
    return result


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    array: Any = bytes_of(tensor).numpy()
    return memoryview(array)


def tensor_view(buffer: torch.Tensor, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over part of a byte buffer."""
    return buffer[offset : offset + nbytes].view(dtype)
