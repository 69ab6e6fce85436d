"""Forks again and again while a thread that Python did not start becomes known to it and unknown: one per rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import llvmlite.binding as llvm

import tfstyle_dist as td

FORKS, SECONDS = 40, 5.0
MOST = 3
"""A thread that the system let wait for longer than the fork may still come in between: about once in 500 forks."""


def address(name: str) -> int:
    found = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    assert found
    return found


def start_thread() -> object:
    """As one of Gloo's, which drops a tensor: it takes the interpreter's lock and gives it back."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(f"""
        define ptr @attach(ptr %nothing) {{
          br label %again
        again:
          %state = call i32 inttoptr (i64 {address("PyGILState_Ensure")} to ptr)()
          call void inttoptr (i64 {address("PyGILState_Release")} to ptr)(i32 %state)
          br label %again
        }}""")
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    thread, function = ctypes.c_ulong(), ctypes.c_void_p(engine.get_function_address("attach"))
    assert ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, function, None) == 0
    return engine


def ends(process: int) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if os.waitpid(process, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def main() -> int:
    strategy = td.MirroredStrategy(["cpu:0"])
    assert strategy.num_replicas_in_sync == 2
    kept, stayed = start_thread(), 0
    for _ in range(FORKS):
        process = os.fork()
        if process == 0:
            os._exit(0)
        stayed += not ends(process)
    assert kept is not None
    print(f"{stayed} stayed", flush=True)
    os._exit(stayed > MOST)  # the thread does not end


if __name__ == "__main__":
    sys.exit(main())
