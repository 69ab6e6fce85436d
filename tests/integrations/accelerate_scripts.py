"""Runs test scripts of accelerate's own wheel with another class in the place of ``Accelerator``; under torchrun.

    torchrun --nproc-per-node 2 accelerate_scripts.py ADD_N,TREE scripts.test_sync scripts.test_ops ...

The first argument is the aggregation methods, or ``stock`` for accelerate's own class: that with one script at a time,
because its process group does not survive being made anew. Rank 0 prints a line for each script.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import sys
import time
import traceback
from typing import Any

import accelerate
import accelerate.accelerator
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import tfstyle_dist as tfd
from tfstyle_dist.comm.rendezvous.bootstrap import default_process_group
from tfstyle_dist.integrations.accelerate import StrategyAccelerator

METHODS = {"ADD_N": tfd.AggregationMethod.ADD_N, "TREE": tfd.AggregationMethod.EXPERIMENTAL_TREE}


class Hooked(StrategyAccelerator):
    """Makes the strategy first, once for each life of the process group, and counts what goes through it."""

    method: int
    made: Any = None
    group: Any = None
    sums = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if Hooked.group is None or Hooked.group is not default_process_group():
            ops = tfd.ReductionToOneDevice(aggregation_method=Hooked.method)
            Hooked.made = tfd.MirroredStrategy(["cpu:0"], cross_device_ops=ops)
            Hooked.group = default_process_group()
            _count_sums(Hooked.made.worker.group)
        super().__init__(*args, strategy=Hooked.made, **kwargs)


def _count_sums(group: Any) -> None:
    own = group.all_reduce_async

    def counted(buffer: torch.Tensor, name: str, agreed: bool = False, method: int = 0) -> Any:
        assert method is Hooked.method, (name, method)
        Hooked.sums += 1
        return own(buffer, name, agreed, method)

    group.all_reduce_async = counted


def put_in_place(method: str) -> None:
    """Before the scripts are imported."""
    if method != "stock":
        Hooked.method = METHODS[method]
        accelerate.Accelerator = Hooked
        accelerate.accelerator.Accelerator = Hooked


def run(name: str, arguments: list[str]) -> str:
    """Runs one script; returns the error, or nothing."""
    sys.argv = [name, *arguments]
    try:
        module = importlib.import_module(f"accelerate.test_utils.{name}")
        accelerate.accelerator.Accelerator(cpu=True)  # a script that asks PartialState first would be alone
        module.main()
    except BaseException:
        return traceback.format_exc()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        for state in (PartialState, AcceleratorState, GradientState):
            state._shared_state.clear()
    return ""


def main() -> int:
    methods, *names = sys.argv[1:]
    failed = 0
    for method, entry in itertools.product(methods.split(","), names):
        put_in_place(method)
        name, *arguments = entry.split()
        start, before = time.perf_counter(), Hooked.sums
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            error = run(name, arguments)
        result = "fail" if error else "pass"
        failed += bool(error)
        seconds, sums = time.perf_counter() - start, Hooked.sums - before
        line = f"{method} {result} {name.rpartition('.')[2]} {seconds:.1f} s, {sums} sums\n"
        if error or os.environ["RANK"] == "0":
            sys.stdout.write(f"{line}{said.getvalue() if error else ''}{error}")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
