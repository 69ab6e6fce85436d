"""What the coordinator and its workers tell each other, on top of ``parameter_server.protocol``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.parameter_server.protocol import byte_streams, pickling, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import (
    Header,
    Kind,
    pack_json,
    pack_message,
    pack_numbers,
)


def send(socket: Any, parts: Sequence[Any]) -> None:
    """``socket.send_multipart`` without its checks, which cost more than sending."""
    *first, last = parts
    for part in first:
        socket.send(part, zeromq_sockets.SNDMORE)
    socket.send(last)


def receive(socket: Any, flags: int = 0) -> list[bytes]:
    """``socket.recv_multipart`` without a system call of ZeroMQ for each part."""
    frame = socket.recv(flags, copy=False)
    parts = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        parts.append(frame.bytes)
    return parts


def parts_of(value: Any) -> list[Any]:
    """A result, pickled; ``None``, the most frequent one, has no parts."""
    return [] if value is None else pickling.dumps(value)


def value_of(parts: Sequence[Any]) -> Any:
    """What ``parts_of`` was given."""
    return pickling.loads(parts) if parts else None


def run(closure: int, attempt: int, low_water: int, function: int, parts: Sequence[Any], flags: int = 0) -> list[Any]:
    """The message that starts a function; without arguments it has no parts."""
    sizes, frames = byte_streams.split(parts)
    meta = struct.pack(f"<{len(sizes) + 1}Q", function, *sizes)
    return [pack_message(Header(Kind.RUN, closure, closure, low_water, attempt, len(meta), 0, flags), meta), *frames]


def finished(low_water: int, below: int, unfinished: Sequence[tuple[int, int]]) -> bytes:
    """The sign of life for servers, which tells them what functions' writes they need not know any more."""
    meta = pack_numbers([below, *(number for pair in unfinished for number in pair)])
    return pack_message(Header(Kind.ALIVE, 0, 0, low_water, meta_bytes=len(meta)), meta)


def result(closure: int, attempt: int, failed: bool, parts: Sequence[Any], flags: int = 0) -> list[Any]:
    """The message that ends a function: its pickled value or exception."""
    sizes, frames = byte_streams.split(parts)
    meta = struct.pack(f"<{len(sizes)}Q", *sizes)
    kind = Kind.ERROR if failed else Kind.OK
    return [pack_message(Header(kind, closure, closure, 0, attempt, len(meta), 0, flags), meta), *frames]


def call(meta: dict[str, Any], parts: Sequence[Any], kind: Kind = Kind.CALL, request: int = 0) -> list[Any]:
    """A message with named values and pickled parts."""
    sizes, frames = byte_streams.split(parts)
    return [plain(kind, {**meta, "sizes": sizes}, request), *frames]


def plain(kind: Kind, meta: dict[str, Any] | None = None, request: int = 0) -> bytes:
    """A message without parts."""
    body = pack_json(meta) if meta is not None else b""
    return pack_message(Header(kind, request, meta_bytes=len(body)), body)
