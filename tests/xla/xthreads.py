"""Several XLA replicas in one process on the CPU: one thread for each of its virtual devices. For tests only.

torch_xla starts threads, not processes, for the CPU's devices, and its collectives between them block each other. What
makes them work, with torch_xla 2.9.0 (two private functions are wrapped):

* enough threads in XLA's pool that each replica's blocked collective has one;
* ``torch_xla.sync()`` in turns, so that a graph is compiled once and the other replicas find it in the cache: XLA on
  the CPU tells collectives apart by the compiled module;
* the same graph on every replica.

Import it before anything that makes torch_xla's client.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

N = int(os.environ.setdefault("CPU_NUM_DEVICES", "2"))
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(8 * N))
os.environ.setdefault("NPROC", str(8 * N))
# With it, collectives between replicas wait for each other for ever.
os.environ.setdefault("PJRT_CPU_ASYNC_CLIENT", "0")

import torch_xla  # noqa: E402
import torch_xla.runtime as xr  # noqa: E402
from torch_xla._internal import pjrt  # noqa: E402

_compiling = threading.RLock()
_step_marker = torch_xla._XLAC._xla_step_marker
_sync_multi = torch_xla._XLAC._xla_sync_multi


def _drain() -> None:
    """Waits, without the lock, until this replica's earlier graphs have run.

    A sync blocks on them, and they may themselves wait for a replica that needs the lock to submit its side.
    """
    torch_xla._XLAC._xla_wait_device_ops([f"{xr.device_type()}:{xr.global_ordinal()}"])


def _step_marker_in_turn(device: str, devices: list[str], wait: bool = True, reset_scope: bool = True) -> None:
    _drain()
    with _compiling:  # compile and submit; execution is asynchronous
        _step_marker(device, devices, wait=False, reset_scope=reset_scope)
    if wait:
        _drain()


def _sync_multi_in_turn(tensors: Any, devices: list[str], wait: bool = True, sync_xla_data: bool = True) -> None:
    _drain()
    with _compiling:
        _sync_multi(tensors, devices, wait=False, sync_xla_data=sync_xla_data)
    if wait:
        _drain()


torch_xla._XLAC._xla_step_marker = _step_marker_in_turn
torch_xla._XLAC._xla_sync_multi = _sync_multi_in_turn


def run(function: Callable[[int], Any]) -> dict[int, Any]:
    """``function(rank)`` on every device; its results by rank."""
    return pjrt._run_thread_per_device(0, 1, lambda: function(xr.global_ordinal()), pjrt.initialize_multiprocess)
