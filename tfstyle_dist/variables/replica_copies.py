"""The copies of a parameter or buffer, one for each local replica, looked up where the replicas' contents are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.contents import ReplicaContents


class _ByReplica(Sequence[torch.Tensor]):
    """One tensor for each local replica, looked up whenever it is asked for."""

    def __init__(self, contents: ReplicaContents, owner: Any) -> None:
        self._contents, self._owner = contents, weakref.ref(owner)

    def __len__(self) -> int:
        return self._contents.count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the parameter or module of this record is gone")
        return self._of(owner, index % len(self))

    def _of(self, owner: Any, replica: int) -> torch.Tensor:
        raise NotImplementedError


class ParameterCopies(_ByReplica):
    """The insides of a module's parameter.

    Args:
        contents: of the strategy.
        owner: the parameter; not kept alive.
    """

    def _of(self, owner: torch.Tensor, replica: int) -> torch.Tensor:
        return self._contents.inside(owner, replica)


class BufferCopies(_ByReplica):
    """A module's buffer: the tensor that has the buffer's name there now.

    Args:
        contents: of the strategy.
        owner: the module that has the buffer; not kept alive.
        name: of the buffer.
    """

    def __init__(self, contents: ReplicaContents, owner: torch.nn.Module, name: str) -> None:
        super().__init__(contents, owner)
        self._name = name

    def _of(self, owner: torch.nn.Module, replica: int) -> torch.Tensor:
        buffer: torch.Tensor = self._contents.attributes(owner, replica)[torch_internals.BUFFERS][self._name]
        return buffer
