"""Numbers of parameters and Variables that are the same on all workers, and the tensors that have them here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.store import ParameterStore


class TensorNumbers:
    """Looks tensors and numbers up, as they are now.

    Args:
        store: what the strategy owns.
    """

    def __init__(self, store: ParameterStore) -> None:
        self._store = store

    @cached_property
    def _by_number(self) -> dict[int, torch.Tensor]:
        assert self._store.contents is not None
        found = {record.number: held for record in self._store.records() if (held := record.tensor) is not None}
        return found | dict(numbered(self._store.contents))

    @cached_property
    def _unrecorded(self) -> dict[int, int]:
        return {id(tensor): number for number, tensor in self._by_number.items() if number < 0}

    def number(self, tensor: Any) -> int | None:
        """That of a parameter or Variable, which every worker has; ``None`` for any other tensor."""
        record = find_record(tensor)
        if record is not None:
            return record.number if record.store is self._store and record.kind != "buffer" else None
        contents = self._store.contents
        return self._unrecorded.get(id(tensor)) if contents is not None and contents.holds(tensor) else None

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor that has a number."""
        return self._by_number[number]

    def living(self, number: int) -> torch.Tensor | None:
        """The same; ``None`` if it is gone on this worker."""
        return self._by_number.get(number)


def numbered(contents: ReplicaContents) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters with numbers that are the same on all workers, also where some are gone on some."""
    for place, parameter in enumerate(contents.parameters()):
        record = find_record(parameter)
        yield (-1 - place if record is None else record.number), parameter
