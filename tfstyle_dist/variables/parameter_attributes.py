"""What programs keep as attributes of parameters, such as a mask: what changed reaches the other replicas' copies."""

from __future__ import annotations

from typing import Any

import torch

from tfstyle_dist.variables.copies import copied
from tfstyle_dist.variables.parameter_marks import Attributes, are_alike, is_own, writes_to


def send(parameter: torch.Tensor, before: Attributes, to: torch.Tensor) -> None:
    """Gives another tensor the attributes that were set, written to or deleted; all others of it stay.

    Args:
        parameter: what has them.
        before: what it had when the two were last alike; ``None``: nothing.
        to: what keeps them for a replica, or for cross-replica context.
    """
    known, now = before or {}, parameter.__dict__
    for name, value in now.items():
        old, version = known.get(name, (None, 0))
        if not is_own(value):
            if value is not old or name not in known:
                to.__dict__[name] = value
        elif value is not old or writes_to(value) != version:
            own: Any = to.__dict__.get(name)
            if value is old and is_own(own) and are_alike(own, value):
                with torch.no_grad():
                    own.copy_(value)  # in place: others may have it
            else:
                to.__dict__[name] = copied(value, to.device)
    for name in known:
        if name not in now:
            to.__dict__.pop(name, None)
