"""How many of torch's threads work for a thread of the program."""

from __future__ import annotations

from tfstyle_dist_kernels.cpu.cpu_threads import work_alone

__all__ = ["work_alone"]
