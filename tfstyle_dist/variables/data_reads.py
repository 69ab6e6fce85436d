"""Who asks a tensor for its ``.data``, or sets it: what is written there leaves no mark on the tensor."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from tfstyle_dist.core.process_hooks import CountedUsers, DataPatch


class Reader(Protocol):
    """Who wants to know."""

    def data_is_read(self, tensor: torch.Tensor, data: torch.Tensor | None) -> None:
        """Somebody has a tensor's ``data`` now, and may write there; ``None``: has set it."""


_readers: list[weakref.ref[Reader]] = []


def _notice(tensor: torch.Tensor, data: torch.Tensor | None) -> None:
    for reference in _readers[:]:  # one may go meanwhile
        if (reader := reference()) is not None:
            reader.data_is_read(tensor, data)


_patch = DataPatch(_notice)


class DataReads(CountedUsers):
    """Tells a reader, while it is installed and the reader lives, which tensors may have been written to."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = weakref.ref(reader)

    def _needed(self, first: bool) -> None:
        _patch.install()
        _readers.append(self._reader)

    def _not_needed(self, last: bool) -> None:
        _readers.remove(self._reader)
        _patch.uninstall()
