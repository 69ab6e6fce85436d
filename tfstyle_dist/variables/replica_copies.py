"""The copies of a parameter or buffer, one for each local replica, looked up where the replicas' contents are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.variables.content.contents import ReplicaContents


class _ByReplica(Sequence[torch.Tensor]):
    """One tensor for each local replica, looked up whenever it is asked for."""

    def __init__(self, contents: ReplicaContents) -> None:
        self._contents = contents

    def __len__(self) -> int:
        return self._contents.count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        owner = self._owner()
        if owner is None:
            raise ReferenceError(
                "The parameter or module of this record is gone, because nothing refers to it any more; "
                "keep it in a variable."
            )
        return self._of(owner, index % len(self))

    def _owner(self) -> Any:
        raise NotImplementedError

    def _of(self, owner: Any, replica: int) -> torch.Tensor:
        raise NotImplementedError


class ParameterCopies(_ByReplica):
    """The insides of a module's parameter.

    Args:
        contents: of the strategy.
        owner: the parameter; not kept alive.
    """

    def __init__(self, contents: ReplicaContents, owner: torch.Tensor) -> None:
        super().__init__(contents)
        self._parameter = refer_to(owner)

    def _owner(self) -> torch.Tensor | None:
        return self._parameter()

    def _of(self, owner: torch.Tensor, replica: int) -> torch.Tensor:
        return self._contents.inside(owner, replica)


class BufferCopies(_ByReplica):
    """A module's buffer: the tensor that has the buffer's name there now.

    Args:
        contents: of the strategy.
    """

    def __init__(self, contents: ReplicaContents) -> None:
        super().__init__(contents)
        self._places: list[tuple[weakref.ref[torch.nn.Module], str]] = []

    def register(self, module: torch.nn.Module, name: str) -> None:
        """A module, not kept alive, has the buffer under this name; as long as it lives that one is asked."""
        place = weakref.ref(module), name
        self._places = [*(known for known in self._places if known != place), place]

    def _owner(self) -> torch.nn.Module | None:
        while self._places and self._places[-1][0]() is None:
            self._places.pop()
        return self._places[-1][0]() if self._places else None

    def _of(self, owner: torch.nn.Module, replica: int) -> torch.Tensor:
        buffers = self._contents.attributes(owner, replica)[torch_internals.BUFFERS]
        buffer: torch.Tensor = buffers[self._places[-1][1]]
        return buffer
