"""Trainable Variables whose value a step took without a graph: a loss that is made of it gives them no gradient.

``value()`` and ``read_value()`` of TensorFlow are differentiated. Here they are for numbers to look at, so a program
that writes a loss with them would train without these variables, in silence.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.runtime.context import current_frame, current_replica
from tfstyle_dist.variables.record import Record

_read: weakref.WeakSet[Record] = weakref.WeakSet()


def note_read(record: Record) -> None:
    """The value of a trainable variable was taken; it counts where a loss may be made of it."""
    if torch.is_grad_enabled() and (current_frame() is None or current_replica() is not None):
        _read.add(record)


def say_without_gradient(records: Iterable[tuple[Record | None, torch.Tensor | None]]) -> None:
    """Says it, once for each, of variables whose value was taken and that have no gradient.

    Args:
        records: of what an optimizer or a program wants gradients for, with these; those of no strategy have no record.
    """
    if not _read:
        return
    for record, gradient in records:
        if record is not None and record in _read and gradient is None:
            warn_once(
                f"value() of {record.number} {id(record.store)}",
                f"The variable {record.local_name} got no gradient in a step that took its value by value() or "
                "read_value(). Their result is a new tensor without a graph, unlike TensorFlow's, so a loss that is "
                "made of it does not train the variable. Compute the loss from the variable itself, as in v * x; for "
                "numbers to look at, take them under torch.no_grad().",
            )
    _read.clear()
