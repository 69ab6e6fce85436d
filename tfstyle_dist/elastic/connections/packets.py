"""What workers send each other: a JSON header and tensors as raw bytes. Nothing that comes is ever executed."""

from __future__ import annotations

import itertools
import json
import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.core import element_types
from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.raw_bytes import view_of

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"tfE1"
MOST_HEADER = 64 * 1024 * 1024
_MOST_OF_STRANGER = 1 << 14
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in element_types.COMMON}
JSON_TYPES = frozenset({bool, int, float, str, type(None)})
"""What JSON carries."""
_META = "meta "  # before the type of a tensor that has no values, as functional modules have


@dataclass
class Packet:
    """One message.

    Attributes:
        header: JSON-able.
        tensors: on the CPU; those of a packet that came are in memory of their own.
    """

    header: dict[str, Any]
    tensors: Sequence[torch.Tensor] = field(default_factory=list)


def check_can_be_sent(tensor: torch.Tensor) -> None:
    """Refuses the types of numbers that ``decode`` does not know.

    Raises:
        TypeError: it has such a type.
    """
    if tensor.dtype not in _DTYPES.values():
        raise TypeError(
            f"A tensor of type {tensor.dtype} cannot be sent to the other workers of an elastic job. Convert it, for "
            f"example with .float(); these can be sent: {', '.join(_DTYPES)}."
        )


def encode(packet: Packet) -> list[memoryview]:
    """The bytes of a packet; they are those of the tensors, not copies."""
    what = [[_name_of(t), list(t.shape), *_strides(t)] for t in packet.tensors]
    header = json.dumps([packet.header, what], separators=(",", ":")).encode()
    views: list[memoryview] = [view_of(t) for t in packet.tensors if t.numel() and not t.is_meta]
    prefix = PREFIX.pack(MAGIC, len(header), sum(v.nbytes for v in views))
    return [memoryview(prefix + header), *views]


def _name_of(tensor: torch.Tensor) -> str:
    return (_META if tensor.is_meta else "") + str(tensor.dtype).removeprefix("torch.")


def lengths(prefix: bytes | bytearray, stranger: bool = False) -> tuple[int, int]:
    """Of the header and the body.

    Args:
        prefix: what came first.
        stranger: whether who sends it is still to say who it is, for which it needs little, and no tensors.

    Raises:
        DataLossError: this is no packet, or too long.
    """
    magic, header, body = PREFIX.unpack(prefix)
    if magic != MAGIC or header > (_MOST_OF_STRANGER if stranger else MOST_HEADER) or (stranger and body):
        raise DataLossError("What came is no message of an elastic job: something else talks to this port.")
    return header, body


def room_for(prefix: bytes | bytearray, stranger: bool) -> tuple[bytearray, bytearray]:
    """Memory for the header and the body, as ``lengths`` says; raises DataLossError where there is none, too."""
    header, body = lengths(prefix, stranger)
    try:
        return bytearray(header), bytearray(body)
    except (MemoryError, OverflowError) as error:
        raise DataLossError(f"There is no memory for a message of {header} and {body} bytes.") from error


def decode(header: bytes | bytearray, body: bytearray) -> Packet:
    """A packet from its bytes; the tensors share the body's memory.

    Raises:
        DataLossError: the bytes do not fit together.
    """
    try:
        values, what = json.loads(bytes(header))
        if not isinstance(values, dict):
            raise DataLossError("A message of an elastic job has no header.")
        tensors, offset = [], 0
        for name, shape, *strides in what:
            dtype, count = _DTYPES[name.removeprefix(_META)], math.prod(shape)
            if name.startswith(_META):
                tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
                continue
            # frombuffer wants the offset of a whole number of elements; a copy has it, and is the rule for mixed types.
            size = count * dtype.itemsize
            part = memoryview(body)[offset : offset + size]
            if part.nbytes != size:
                raise DataLossError("A message of an elastic job ended too early.")
            offset += size
            tensors.append(_laid_out(_tensor(part, dtype, count).view(shape), *strides))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise DataLossError(f"A message of an elastic job cannot be read: {error}.") from error
    return Packet(values, tensors)


def _tensor(part: memoryview, dtype: torch.dtype, count: int) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(part, dtype=torch.uint8)
    return raw.view(dtype) if raw.data_ptr() % dtype.itemsize == 0 else raw.clone().view(dtype)


def _strides(tensor: torch.Tensor) -> list[list[int]]:
    """Those that a copy of the tensor has, if they are unusual: sums of other layouts have other last bits."""
    if tensor.dim() < 2 or not tensor.numel():
        return []
    usual = list(itertools.accumulate(reversed(tensor.shape[1:]), operator.mul, initial=1))[::-1]
    strides = list(torch.empty_like(tensor).stride())
    return [] if strides == usual else [strides]


def _laid_out(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    if strides is None:
        return tensor
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    if last >= tensor.numel():
        raise DataLossError("A tensor in a message of an elastic job has strides that do not fit its sizes.")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
