"""The options of ``ParameterServerStrategy``, checked."""

from __future__ import annotations

import os
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol.work import WireOptions


def checked_staleness(max_staleness: Any) -> int | None:
    """The bound, or ``None``.

    Raises:
        ValueError: it is no whole number from 0 on.
    """
    if max_staleness is None:
        return None
    if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0:
        raise ValueError(
            f"max_staleness={max_staleness!r}: write a whole number of updates from 0 on, or None for no bound."
        )
    return max_staleness


def wire_options(dtype: Any, ahead: bool) -> WireOptions:
    """How tensors travel.

    Raises:
        ValueError: a dtype that they cannot travel with.
    """
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"wire_dtype={dtype!r}: write torch.bfloat16, or None for the parameters' own dtype.")
    return WireOptions(dtype, bool(ahead))


def snapshot_options(folder: Any, seconds: float, every_write: bool) -> dict[str, Any] | None:
    """What servers are told about snapshots; ``None``: to make none.

    Raises:
        ValueError: ``seconds`` is not above 0, or ``every_write`` without a folder.
    """
    if not seconds > 0:
        raise ValueError(f"snapshot_seconds={seconds!r}: write a number of seconds above 0, e.g. 60.")
    if folder is None:
        if every_write:
            raise ValueError("snapshot_every_write=True needs a snapshot_folder to write to.")
        return None
    return {"folder": os.path.abspath(os.fspath(folder)), "seconds": float(seconds), "every_write": bool(every_write)}
