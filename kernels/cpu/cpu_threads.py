"""Runs one function in all threads that torch uses on the CPU.

A thread pool of our own would lose: after each of torch's parallel operations its threads keep their cores busy for
some milliseconds, waiting for the next one. So the next one is ours: the call goes to the OpenMP library that torch
itself has loaded, and to the same threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

_Function: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SOFT: Final = 1  # omp_pause_soft: the settings of OpenMP stay as they are
_is_forked = False


class Team(NamedTuple):
    """Threads that can run a function together.

    Attributes:
        num_threads: how many, this one included.
        thread_number: the address of a C function by which each finds its number; 0 if there is one.
    """

    num_threads: int
    thread_number: int

    def run(self, function: int, argument: int) -> None:
        """Calls C code in all of them at the same time, without the interpreter's lock.

        Args:
            function: the address of a function of one address.
            argument: what each thread calls it with.
        """
        if self.num_threads == 1:
            _Function(function)(argument)
        else:
            _openmp().GOMP_parallel(function, argument, self.num_threads, 0)


ALONE: Final = Team(1, 0)


def find_team(num_threads: int) -> Team:
    """The threads that can help; none in a forked process, which has not its parent's, and where torch has no OpenMP.

    Args:
        num_threads: ``torch.get_num_threads()``: a pool that torch finds in another size than it left it is made anew.
    """
    if num_threads < 2 or _is_forked or _openmp() is None:
        return ALONE
    return Team(num_threads, _number_address())


def work_alone() -> None:
    """Torch's operations in the calling thread take no other threads from now on.

    Otherwise each thread of the program that calls a large operation gets as many others of its own, which stay.
    """
    torch.get_num_threads()  # torch gives a thread its number when it first asks
    if (openmp := _openmp()) is not None:
        openmp.omp_set_num_threads(1)


def can_end_pools() -> bool:
    """Whether torch has GNU's OpenMP, which keeps a pool of threads for each thread that computes, and can end one."""
    return not _is_forked and _pause() is not None


def end_pool() -> None:
    """Ends the pool of the calling thread, if it has one; in a forked process, which has not its threads, nothing."""
    if not _is_forked and (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """GNU's ``omp_pause_resource_all``; those of Intel and LLVM end the pools of all threads."""
    openmp = _openmp()
    return None if hasattr(openmp, "__kmpc_fork_call") else getattr(openmp, "omp_pause_resource_all", None)


@cache
def _openmp() -> Any:
    """Torch's OpenMP, if it has the entry point that GNU's defines and those of Intel and LLVM offer too."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        openmp = ctypes.CDLL(str(library))
        parallel, _ = openmp.GOMP_parallel, openmp.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return openmp


@cache
def _number_address() -> int:
    return ctypes.cast(_openmp().omp_get_thread_num, ctypes.c_void_p).value or 0


def _after_fork_in_child() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_after_fork_in_child)
