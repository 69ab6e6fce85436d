"""Tensors as streams of bytes in messages of limited size, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.ops import streamed
from tfstyle_dist.parameter_server.protocol.header import CHUNK, INLINE, ProtocolError
from tfstyle_dist.parameter_server.protocol.operations import padded, tensor_bytes

_LARGE = 1 << 17


def stream(tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors, padded, in messages of at most ``CHUNK`` bytes.

    Large tensors go without a copy, small ones together. Each view is valid until the next one is asked for.
    """
    scratch = torch.empty(0, dtype=torch.uint8)
    waiting: list[tuple[memoryview, int]] = []
    total = 0
    for tensor in tensors:
        view = tensor_bytes(tensor)
        room = padded(len(view))
        if len(view) >= INLINE and room == len(view):
            if total:
                yield pack_views(waiting, scratch := _enough(scratch, total), total)
                waiting, total = [], 0
            for offset in range(0, len(view), CHUNK):
                yield view[offset : offset + CHUNK]
            continue
        while total + room > CHUNK:
            # The rest of the room of a full message is taken by the first part of this tensor.
            part = CHUNK - total
            waiting.append((view[:part], total))
            yield pack_views(waiting, scratch := _enough(scratch, CHUNK), CHUNK)
            waiting, total, view, room = [], 0, view[part:], room - part
        waiting.append((view, total))
        total += room
    if total:
        yield pack_views(waiting, _enough(scratch, total), total)


def views(tensors: Sequence[torch.Tensor], copied: Collection[int] = ()) -> list[memoryview]:
    """The bytes of tensors and of the padding between them: large ones without a copy, small ones together.

    Args:
        tensors: contiguous, on the CPU.
        copied: indices of those that are to be copied, however large.
    """
    found: list[memoryview] = []
    waiting: list[tuple[memoryview, int]] = []
    total = 0
    for index, tensor in enumerate([*tensors, None]):
        view = None if tensor is None else tensor_bytes(tensor)
        if view is None or (len(view) >= _LARGE and index not in copied):
            if total:
                found.append(pack_views(waiting, torch.empty(total, dtype=torch.uint8), total))
                waiting, total = [], 0
            if view is not None:
                found.append(view)
                if padded(len(view)) > len(view):
                    found.append(memoryview(bytes(padded(len(view)) - len(view))))
            continue
        waiting.append((view, total))
        total += padded(len(view))
    return found


def pack(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copies tensors one after another, padded.

    Args:
        tensors: contiguous, on the CPU.
        flat: bytes (uint8), enough for all.
    """
    offset = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        streamed.copy_bytes(bytes_of(tensor), flat[offset : offset + nbytes])
        offset += padded(nbytes)


def join_tensors(tensors: Sequence[torch.Tensor], total: int) -> torch.Tensor:
    """Tensors and the padding between them as one, copied only if there is more than one.

    Args:
        tensors: contiguous, on the CPU.
        total: bytes of all.
    """
    if tensors[0].nbytes == total:
        return tensors[0]
    flat = torch.empty(total, dtype=torch.uint8)
    pack(tensors, flat)
    return flat


def _enough(scratch: torch.Tensor, nbytes: int) -> torch.Tensor:
    return scratch if scratch.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)


def pack_views(views: Sequence[tuple[memoryview, int]], flat: torch.Tensor, total: int) -> memoryview:
    """Puts bytes at their offsets in a flat buffer.

    Args:
        views: bytes and offsets.
        flat: the buffer.
        total: how much of it is used.
    """
    room = tensor_bytes(flat)
    for view, offset in views:
        room[offset : offset + len(view)] = view
    return room[:total]


class Filler:
    """Puts a stream of bytes into tensors, one after another, leaving out the padding.

    Args:
        targets: flat byte tensors.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._targets = [(tensor_bytes(t), padded(t.numel())) for t in targets]
        self._place, self._offset = 0, 0
        self.total = sum(room for _, room in self._targets)

    def rooms(self) -> Iterator[memoryview]:
        """The buffers to fill, in order, with those of the padding."""
        for view, room in self._targets:
            yield view
            if room > len(view):
                yield memoryview(bytearray(room - len(view)))

    def take(self, data: memoryview) -> None:
        """The next bytes.

        Raises:
            ProtocolError: more than the tensors take.
        """
        start = 0
        while start < len(data):
            if self._place == len(self._targets):
                raise ProtocolError(f"{len(data) - start} bytes too many")
            view, room = self._targets[self._place]
            count = min(room - self._offset, len(data) - start)
            end = min(self._offset + count, len(view))
            if end > self._offset:
                view[self._offset : end] = data[start : start + end - self._offset]
            start += count
            self._offset += count
            if self._offset == room:
                self._place, self._offset = self._place + 1, 0


class Tensors:
    """The bytes of one message as the tensors that they are, one after another.

    Args:
        data: flat, uint8.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._offset = data, 0
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The next one, without a copy."""
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = self._data.view(dtype)
        steps, numel = [], 1
        for size in reversed(shape):
            steps.append(numel)
            numel *= size
        start = flat.storage_offset() + self._offset // dtype.itemsize
        self._offset += padded(numel * dtype.itemsize)
        return flat.as_strided(shape, steps[::-1], start)  # slices and views take three times as long


def split(parts: Sequence[Any]) -> tuple[list[int], list[memoryview]]:
    """Buffers as frames of at most ``CHUNK`` bytes, and their sizes."""
    views = [memoryview(part).cast("B") for part in parts]
    frames = [view[o : o + CHUNK] for view in views for o in range(0, len(view), CHUNK)]
    return [len(view) for view in views], frames


def join(sizes: Any, frames: Sequence[Any]) -> list[Any]:
    """Puts together what ``split`` cut.

    Raises:
        ProtocolError: the frames do not add up to the sizes, or these are no list of sizes.
    """
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ProtocolError(f"{str(sizes)[:80]!r} is no list of sizes of parts")
    parts, index = [], 0
    for size in sizes:
        pieces, got = [], 0
        while got < size and index < len(frames):
            pieces.append(frames[index])
            got += len(frames[index])
            index += 1
        if got != size:
            raise ProtocolError(f"a part of {size} bytes came as {got}")
        parts.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    if index != len(frames):
        raise ProtocolError(f"{len(frames) - index} frames too many")
    return parts
