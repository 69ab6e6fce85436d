"""Runs one function in all threads that torch uses on the CPU.

A thread pool of our own would lose: after each of torch's parallel operations its threads keep their cores busy for
some milliseconds, waiting for the next one. So the next one is ours: the call goes to the OpenMP library that torch
itself has loaded, and to the same threads.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

_Function: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_is_forked = False


def run(function: int, argument: int, num_threads: int) -> None:
    """Calls C code without the interpreter's lock, in this thread and in others of torch's pool at the same time.

    In a forked process, which has none of its parent's threads, and where torch has no OpenMP, this thread is alone.

    Args:
        function: The address of a function of one address.
        argument: What each thread calls it with.
        num_threads: In how many threads at most, this one included. Give ``torch.get_num_threads()``: a pool that
            torch finds in another size than it left it is made anew.
    """
    parallel = None if num_threads < 2 or _is_forked else _openmp()
    if parallel is None:
        _Function(function)(argument)
    else:
        parallel(function, argument, num_threads, 0)


def has_helpers() -> bool:
    """Whether other threads can help this process."""
    return not _is_forked and _openmp() is not None


@cache
def _openmp() -> Any:
    """The entry point that GNU's OpenMP defines and those of Intel and LLVM have too."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _after_fork_in_child() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_after_fork_in_child)
