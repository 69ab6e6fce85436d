"""What travels between a parameter server and its clients: one checked header, operations, raw tensor bytes.

A request is a header message (header, then a table of operations or JSON), followed by the tensors' bytes in
messages of at most ``CHUNK`` bytes. The receiver checks the header before it takes any buffer. An answer looks alike.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

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
_STRANGE = "this is no message of a tfstyle_dist parameter server"
_HEADER = struct.Struct("<4sBBHQQQIIQ")


class ProtocolError(InvalidArgumentError):
    """A message that no well-behaved peer sends."""


class Kind(enum.IntEnum):
    """What a message is."""

    HANDSHAKE = 1
    BATCH = 2
    CALL = 3
    GOODBYE = 4
    ALIVE = 5
    RUN = 6
    OK = 16
    ERROR = 17


_KINDS = {int(kind): kind for kind in Kind}


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
            ProtocolError: not a message of this protocol, or one that contradicts itself.
        """
        if len(message) < _HEADER.size:
            raise ProtocolError(f"a message of {len(message)} bytes is shorter than a header of {_HEADER.size}")
        magic, version, kind, flags, request, closure, low, attempt, meta, data = _HEADER.unpack_from(message)
        if magic != MAGIC:
            raise ProtocolError(_STRANGE)
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version} of the protocol, this process version {VERSION}")
        if kind not in _KINDS:
            raise ProtocolError(f"unknown kind of message {kind}")
        if meta > MAX_META or meta != len(message) - _HEADER.size:
            raise ProtocolError(f"the header announces {meta} bytes, but {len(message) - _HEADER.size} follow it")
        return cls(_KINDS[kind], request, closure, low, attempt, meta, data, flags)


HEADER_SIZE = _HEADER.size


def message_lengths(data: bytes) -> tuple[int, int] | None:
    """How long a message is at the start of a stream: header with meta part, and inline data.

    Returns:
        ``None`` as long as its header is not there.

    Raises:
        ProtocolError: no message begins here.
    """
    if len(data) < HEADER_SIZE:
        return None
    magic, _, _, flags, _, _, _, _, meta, inline = _HEADER.unpack_from(data)
    inline = inline if flags & FLAG_INLINE else 0
    if magic != MAGIC or meta > MAX_META or inline > INLINE:
        raise ProtocolError(_STRANGE)
    return HEADER_SIZE + meta, inline


def pack_message(header: Header, meta: bytes) -> bytes:
    """Header and meta part as one message."""
    return header.pack() + meta


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """A meta part of numbers from 0 on."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(meta: bytes | memoryview) -> list[int]:
    """Reads a meta part of numbers.

    Raises:
        ProtocolError: it is none.
    """
    if len(meta) % 8:
        raise ProtocolError(f"{len(meta)} bytes are no list of numbers")
    return list(struct.unpack(f"<{len(meta) // 8}Q", meta))


def pack_json(value: dict[str, Any]) -> bytes:
    """A meta part of named values."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(meta: bytes | memoryview) -> dict[str, Any]:
    """Reads a meta part of named values.

    Raises:
        ProtocolError: not a JSON object.
    """
    try:
        value = json_text.parse(bytes(meta))
    except ValueError as error:
        raise ProtocolError(f"the meta part is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("the meta part is no JSON object")
    return value


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
