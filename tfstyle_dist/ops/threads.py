"""How many of torch's threads work for a thread of the program."""

from __future__ import annotations

from tfstyle_dist_kernels.cpu.cpu_threads import can_end_pools, end_pool, work_alone

__all__ = ["can_end_pools", "end_pool", "work_alone"]
