"""What travels between a parameter server and its clients: one checked header, operations, raw tensor bytes.

A request is a header message (header, then a table of operations or JSON), followed by the tensors' bytes in
messages of at most ``CHUNK`` bytes. The receiver checks the header before it takes any buffer. An answer looks alike.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tfstyle_dist.core import json_text
from tfstyle_dist.core.errors import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

MAGIC, VERSION = b"tfPS", 1
CHUNK = 1 << 20
INLINE = 1 << 16
"""Up to this size the tensors travel in the header's own message."""
MAX_META = 1 << 20
MAX_OPERATIONS = 1 << 15
ALIGNMENT = 16
MOST_COPIED = 1 << 30
"""So many bytes of rows, and of variables that are asked for again, one answer may have."""

_HEADER = struct.Struct("<4sBBHQQQIIQ")
_OPERATION = struct.Struct("<BBHIQQQ")

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class WireError(InvalidArgumentError):
    """A message that no well-behaved peer sends."""


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    BATCH = 2
    CALL = 3
    GOODBYE = 4
    ALIVE = 5
    RUN = 6
    OK = 16
    ERROR = 17


_KINDS = {int(kind): kind for kind in Kind}


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


WRITES = frozenset({Op.ASSIGN, Op.ADD, Op.SUB, Op.GRADIENT, Op.ADD_ROWS, Op.GRADIENT_ROWS})

ROW_OPERATIONS = frozenset({Op.PULL_ROWS, Op.ADD_ROWS, Op.GRADIENT_ROWS})

NARROWED = frozenset({Op.PULL, Op.PULL_ROWS, Op.GRADIENT, Op.GRADIENT_ROWS})

FLAG_UNCHANGED = 1
"""In the answer to a PULL: the client's copy is the newest, no data follows."""
FLAG_DUPLICATE = 2
"""In the answer to a write: an earlier attempt of the same closure made this write already."""
FLAG_INLINE = 4
"""In a header: the data is the second part of the same message."""
FLAG_SHARED = 8
"""In a header: the data is in the client's shared memory segment; in a request also: the answer may be put there."""
FLAG_KEEP = 32
"""In a RUN: the worker keeps the result, for functions that have it among their arguments."""
FLAG_AGAIN = 64
"""In the answer to a RUN: a parameter server was lost that can come back; the function is to be run again."""
FLAG_NO_VALUE = 128
"""In the answer to a RUN: the worker does not have (any more) a result that is among the arguments."""


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


class Header(NamedTuple):
    """The fixed part of a message.

    Attributes:
        kind: what it is.
        request: the sender's number of this request; an answer repeats it.
        closure: the scheduled function at work; 0 outside.
        low_water: every closure with a smaller number is finished.
        attempt: how often this closure was started before, plus one.
        meta_bytes: size of the part after the header.
        data_bytes: how many bytes follow in further messages.
        flags: see the ``FLAG_`` constants.
    """

    kind: Kind
    request: int
    closure: int = 0
    low_water: int = 0
    attempt: int = 0
    meta_bytes: int = 0
    data_bytes: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        """The header's bytes."""
        return _HEADER.pack(
            MAGIC, VERSION, self.kind, self.flags, self.request, self.closure, self.low_water, self.attempt,
            self.meta_bytes, self.data_bytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, message: bytes | memoryview) -> Header:
        """Reads and checks a header.

        Raises:
            WireError: not a message of this protocol, or one that contradicts itself.
        """
        if len(message) < _HEADER.size:
            raise WireError(f"a message of {len(message)} bytes is shorter than a header of {_HEADER.size}")
        magic, version, kind, flags, request, closure, low, attempt, meta, data = _HEADER.unpack_from(message)
        if magic != MAGIC:
            raise WireError("this is no message of a tfstyle_dist parameter server")
        if version != VERSION:
            raise WireError(f"the peer speaks version {version} of the protocol, this process version {VERSION}")
        if kind not in _KINDS:
            raise WireError(f"unknown kind of message {kind}")
        if meta > MAX_META or meta != len(message) - _HEADER.size:
            raise WireError(f"the header announces {meta} bytes, but {len(message) - _HEADER.size} follow it")
        return cls(_KINDS[kind], request, closure, low, attempt, meta, data, flags)


HEADER_SIZE = _HEADER.size


def lengths(data: bytes) -> tuple[int, int] | None:
    """How long a message is at the start of a stream: header with meta part, and inline data.

    Returns:
        ``None`` as long as its header is not there.

    Raises:
        WireError: no message begins here.
    """
    if len(data) < HEADER_SIZE:
        return None
    magic, _, _, flags, _, _, _, _, meta, inline = _HEADER.unpack_from(data)
    inline = inline if flags & FLAG_INLINE else 0
    if magic != MAGIC or meta > MAX_META or inline > INLINE:
        raise WireError("this is no message of a tfstyle_dist parameter server")
    return HEADER_SIZE + meta, inline


@dataclass(slots=True)
class Operation:
    """One entry of a batch, or of the answer to one.

    Attributes:
        op: what to do.
        dtype: of the bytes.
        variable: number of the variable (shard).
        argument: PULL: the version the client has; writes: how many writes to this variable the closure made before.
        rows: number of rows of a sparse operation.
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


def pack_operations(operations: Sequence[Operation]) -> bytes:
    """The table of a batch."""
    return b"".join(
        _OPERATION.pack(o.op, o.dtype, o.extra, o.variable, o.argument, o.rows, o.nbytes) for o in operations
    )


def unpack_operations(meta: bytes | memoryview) -> list[Operation]:
    """The entries of a batch.

    Raises:
        WireError: the table is cut off, too long, or names an unknown dtype.
    """
    count, rest = divmod(len(meta), _OPERATION.size)
    if rest or count > MAX_OPERATIONS:
        raise WireError(f"a table of {len(meta)} bytes is no list of at most {MAX_OPERATIONS} operations")
    result = []
    for op, dtype, extra, variable, argument, rows, nbytes in _OPERATION.iter_unpack(meta):
        if dtype >= len(DTYPES):
            raise WireError(f"unknown dtype number {dtype}")
        result.append(Operation(op, dtype, variable, argument, rows, nbytes, extra))
    return result


def message(header: Header, meta: bytes) -> bytes:
    """Header and meta part as one message."""
    return header.pack() + meta


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """A meta part of numbers from 0 on."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(meta: bytes | memoryview) -> list[int]:
    """Reads a meta part of numbers.

    Raises:
        WireError: it is none.
    """
    if len(meta) % 8:
        raise WireError(f"{len(meta)} bytes are no list of numbers")
    return list(struct.unpack(f"<{len(meta) // 8}Q", meta))


def pack_json(value: dict[str, Any]) -> bytes:
    """A meta part of named values."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(meta: bytes | memoryview) -> dict[str, Any]:
    """Reads a meta part of named values.

    Raises:
        WireError: not a JSON object.
    """
    try:
        value = json_text.parse(bytes(meta))
    except ValueError as error:
        raise WireError(f"the meta part is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError("the meta part is no JSON object")
    return value


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    flat = tensor.detach() if tensor.dim() == 1 else tensor.detach().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def tensor_view(buffer: torch.Tensor, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over part of a byte buffer."""
    return buffer[offset : offset + nbytes].view(dtype)


_ERRORS = {
    kind.__name__: kind
    for kind in (
        CancelledError, DataLossError, DeadlineExceededError, InvalidArgumentError, NotFoundError, UnavailableError,
        PermissionError, OSError, TypeError, ValueError, RuntimeError,
    )
}  # fmt: skip


def pack_error(error: BaseException) -> bytes:
    """An exception as a meta part."""
    known = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _ERRORS), "RuntimeError")
    text = str(error) if type(error).__name__ == known else f"{type(error).__name__}: {error}"
    return pack_json({"error": known, "message": text[:4000]})


def unpack_error(meta: bytes | memoryview, who: str) -> Exception:
    """The exception that a peer reported."""
    value = unpack_json(meta)
    kind: Any = _ERRORS.get(str(value.get("error")), RuntimeError)
    return kind(f"{value.get('message')} [{who}]")  # type: ignore[no-any-return]
