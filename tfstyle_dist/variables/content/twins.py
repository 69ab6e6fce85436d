"""Tensors that share memory for replica 0 share memory for every replica: a view of a parameter stays a view of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tfstyle_dist.variables.content.copies import copied, made_like
from tfstyle_dist.variables.content.parameter_marks import memory_of

_Pair = tuple[torch.Tensor, torch.Tensor]  # the first keeps its memory, so that no other tensor gets the address
Pairs = Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor | None]]]


class Twins:
    """Which memory of a replica stands for which memory of the objects as they are shown now.

    It is known while objects are taken and spread, and forgotten afterwards: a view holds its memory by itself.

    Args:
        pairs: gives the parameters with the tensors that have their insides for a replica, those that have got other
            memory with ``None``, and gradients.

    Attributes:
        written: by id: parameters of whose memory something was copied, which may have been written to through it.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more; what was given out is a view by itself."""
        self._noted: dict[tuple[int, int], _Pair] = {}
        self._parameters: dict[int, dict[int, tuple[_Pair, int]]] = {}
        self._moved: set[int] = set()
        self.written: set[int] = set()

    def note(self, replica: int, value: torch.Tensor, own: torch.Tensor) -> None:
        """What a replica has in the place of a tensor; of use if it has all of the tensor's memory."""
        if (address := memory_of(value)) and _is_whole(value, own):
            self._noted[replica, address] = (value.detach(), own)

    def copy(self, replica: int, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What a replica gets in the place of a tensor: a view where it has the memory, else a copy."""
        address = memory_of(value)
        if address and self._found(replica, address) is None and address in self._moved:  # a parameter has got a part
            return self.copy_part(replica, value, device)
        return self._copy(replica, value, device)

    def _copy(self, replica: int, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        pair = self._found(replica, memory_of(value))
        own = copied(value, device) if pair is None or pair[1].device != device else _view(pair[1], value)
        self.note(replica, value, own)
        return own

    def _found(self, replica: int, address: int) -> _Pair | None:
        pair = self._noted.get((replica, address))
        if pair is not None or not address:
            return pair
        if replica not in self._parameters:
            found: dict[int, tuple[_Pair, int]] = {}
            for parameter, own in self._pairs(replica):
                if own is None:
                    self._moved.add(memory_of(parameter))
                elif (its := memory_of(parameter)) and _is_whole(parameter, own):
                    found[its] = (parameter.detach(), own), id(parameter)
            self._parameters[replica] = found
        if (of_parameter := self._parameters[replica].get(address)) is None:
            return None
        self.written.add(of_parameter[1])
        return of_parameter[0]

    def copy_part(self, replica: int, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """As ``copy``, where all other parts of the tensor's memory may be a parameter's or a gradient's too."""
        address = memory_of(value)
        if address and value.untyped_storage().nbytes() > value.nbytes and self._found(replica, address) is None:
            count = value.untyped_storage().nbytes() // value.element_size()
            whole = value.detach().as_strided((count,), (1,), 0)
            self.note(replica, whole, copied(whole, device))
        return self._copy(replica, value, device)

    def share(self, replica: int, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor itself: all replicas have the same one, and the views of it."""
        self.note(replica, value, value)
        return value

    def noted(self, replica: int, value: torch.Tensor) -> torch.Tensor | None:
        """A view of what another tensor, no parameter, has in a replica in the place of this tensor's memory."""
        pair = self._noted.get((replica, memory_of(value))) if self._noted else None
        return None if pair is None else _view(pair[1], value)


def _is_whole(value: torch.Tensor, own: torch.Tensor) -> bool:
    return own.dtype == value.dtype and own.untyped_storage().nbytes() == value.untyped_storage().nbytes()


def _view(base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with made_like(base):
        made = torch.empty(0, dtype=value.dtype, device=base.device)
        return made.set_(base.untyped_storage(), value.storage_offset(), value.shape, value.stride())
