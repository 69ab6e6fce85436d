"""Which record belongs to a tensor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.record import Placement, Record

_records: torch_internals.WeakIdKeyDictionary = torch_internals.WeakIdKeyDictionary()
_records_lock = threading.Lock()


def find_record(tensor: Any) -> Record | None:
    """The record of any tensor a strategy owns: replicated, variable, component or plain adopted parameter."""
    if not isinstance(tensor, torch.Tensor):
        return None
    record: Record | None = getattr(tensor, "_tfstyle_record", None)
    if record is None:
        entry = _records.get(tensor)
        record = entry() if isinstance(entry, weakref.ref) else entry
    return record


def remember(tensor: torch.Tensor, record: Record) -> None:
    """From now on the tensor has this record, which lives as long as the tensor."""
    with _records_lock:
        _records[tensor] = record


def remember_components(record: Record) -> None:
    """Lets a component be traced to its record; weakly, because the record holds the component."""
    reference = weakref.ref(record)
    with _records_lock:
        for tensor in record.components:
            _records[tensor] = reference


def made_in_turns(*tensors: torch.Tensor) -> bool:
    """Whether all of them are a strategy's, and came into being in the turn of a replica of this process."""
    records = [find_record(tensor) for tensor in tensors]
    return all(record is not None and record.maker is not None for record in records)


def follow_buffer(record: Record) -> None:
    """``module.double()``, or an assignment in ``forward``, puts a new tensor in a plain buffer's place."""
    if record.placement is Placement.REMOTE:
        return  # the new one is adopted when a function uses the module: the servers may have it in another dtype
    module = record.module() if record.module is not None else None
    current = None if module is None else torch_internals.buffers_of(module).get(record.local_name)
    if current is not None and current is not record.tensor:
        record.rebind(current)
        remember(current, record)


class WeakComponents(list[torch.Tensor]):
    """The one-entry component list of a record's own tensor, without a strong reference to it.

    Args:
        record: of a plain parameter or buffer, or of a divided parameter.
        part: what stands for the tensor; default: itself.
    """

    def __init__(self, record: Record, part: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__([torch.empty(0)])
        self._record, self._part = weakref.ref(record), part

    def __getitem__(self, index: Any) -> Any:
        record = self._record()
        tensor = None if record is None else record.tensor
        if tensor is None:
            raise ReferenceError(
                "The parameter of this record is gone, because nothing refers to it any more; "
                "keep its module in a variable."
            )
        return [tensor if self._part is None else self._part(tensor)][index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self[0]])
