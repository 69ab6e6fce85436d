"""What programs keep as attributes of parameters, such as a mask: what changed reaches the other replicas' copies.

As of the attributes of a module, each replica has tensors that are not trained, and containers, of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from tfstyle_dist.variables.content.copies import PLAIN_TENSORS, Copier, copied
from tfstyle_dist.variables.content.marks import unchanged
from tfstyle_dist.variables.content.parameter_marks import Attributes, are_alike


def send(parameter: torch.Tensor, before: Attributes, to: torch.Tensor) -> None:
    """Gives another tensor the attributes that were set, written to or deleted; all others of it stay.

    Args:
        parameter: what has them.
        before: what it had when the two were last alike; ``None``: nothing.
        to: what keeps them for a replica, or for cross-replica context.
    """
    marks, now = before or {}, parameter.__dict__
    copier = Copier(lambda _: False, lambda tensor: copied(tensor, to.device))
    for name, value in now.items():
        if name in marks and unchanged(value, marks[name]):
            continue
        own: Any = to.__dict__.get(name)
        if name in marks and _is_written_in_place(value, marks[name], own):
            with torch.no_grad():
                own.copy_(value)  # others may have it
        else:
            to.__dict__[name] = copier(value)
    for name in marks:
        if name not in now:
            to.__dict__.pop(name, None)


def _is_written_in_place(value: Any, mark: Any, own: Any) -> bool:
    if type(value) not in PLAIN_TENSORS or type(own) not in PLAIN_TENSORS:
        return False
    return bool(value is getattr(mark, "value", None)) and are_alike(own, value)
