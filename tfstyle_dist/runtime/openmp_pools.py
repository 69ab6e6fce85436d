"""The pools of OpenMP with which replicas compute on the CPU, and whether each ends with its replica's turn.

GNU's OpenMP has a pool of threads for each thread that computes. Between two operations its threads spin for some
milliseconds, unless all pools together have more threads than there are cores: then they sleep, and each operation
wakes them. Two replicas of a process have two pools, and on idle cores their steps take up to twice as long as in one
thread (``docs/log.md``). A pool that ends with the turn is not in the way of the other replica's, but the next
operation makes it again. That costs 0.1 ms on idle cores, and far more than sleeping where others use them. So both are
tried.
"""

from __future__ import annotations

import os
import time

import torch

from tfstyle_dist.ops.threads import can_end_pools

_FIRST_WAIT, _LONGEST_WAIT = 16, 4096  # runs before a trial; each time four times as many
_PASSED_OVER = 2  # the first runs of each part of a trial, in which pools end or begin
_COUNTED = 6  # the others; their sum counts, so that two or three kinds of runs that alternate are in each part
_GAIN = 0.85  # how long they may take, of what they take with pools that stay, for pools to end
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_PARTS = (False, True, False)  # whether pools end in the parts of a trial


class OpenMPPools:
    """Decides it for the runs of one strategy, by how long they take with pools that stay and with pools that end.

    Args:
        replicas: how many of this process compute on the CPU.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._ends = self._chosen = False
        self._wait, self._left = _FIRST_WAIT, _FIRST_WAIT
        self._parts: list[list[float]] = []  # of a trial under way: the seconds of the runs of each part
        self._recent: list[float] = []  # with pools that end: of the runs since they were last summed up
        self._slow, self._usual = 0, 0.0  # such sums in succession that were over the usual one; with pools that stay
        self._began = 0.0

    def begin(self) -> bool:
        """A run begins; returns whether each pool ends with its replica's turn."""
        if self._began:  # within another run
            return self._ends
        self._ends = False
        if self._replicas > 1 and 1 + self._replicas * (torch.get_num_threads() - 1) > _CORES and can_end_pools():
            if not self._parts and self._left <= 0:
                self._parts = [[]]
            self._ends = _PARTS[len(self._parts) - 1] if self._parts else self._chosen
            self._began = time.perf_counter()
        return self._ends

    def finish(self, counts: bool) -> None:
        """The run is over; ``counts``: it did not raise."""
        began, self._began = self._began, 0.0
        if not began or not counts:
            return
        seconds = time.perf_counter() - began
        if self._parts:
            self._try(seconds)
            return
        self._left -= 1
        if self._chosen:
            self._recent.append(seconds)
            if len(self._recent) == _COUNTED:
                self._slow = self._slow + 1 if sum(self._recent) > self._usual else 0
                self._recent = []
                if self._slow == 2:  # others use the cores now, or the step is another one
                    self._choose(False)

    def _try(self, seconds: float) -> None:
        part = self._parts[-1]
        part.append(seconds)
        if self._ends and seconds > 3 * max(self._parts[0]):
            self._choose(False)
        elif len(part) == _PASSED_OVER + _COUNTED:
            if len(self._parts) < len(_PARTS):
                self._parts.append([])
            else:
                before, ended, after = (sum(part[_PASSED_OVER:]) for part in self._parts)
                self._usual = min(before, after)
                self._choose(ended < _GAIN * self._usual)

    def _choose(self, end: bool) -> None:
        self._chosen, self._slow, self._parts, self._recent = end, 0, [], []
        self._left = self._wait = min(4 * self._wait, _LONGEST_WAIT)
