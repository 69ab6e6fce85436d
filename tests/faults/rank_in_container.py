"""A rank that sums with the other one until it is told, or lost: run by test_ranks_in_containers.py."""

from __future__ import annotations

import os
import sys

import torch

import tfstyle_dist as td


def held_up_here() -> None:
    """Does not take part."""
    input()


def main() -> None:
    rank, what = int(os.environ["RANK"]), sys.argv[1]
    strategy = td.MultiWorkerMirroredStrategy()
    group = strategy.worker.group
    print("started", os.getpid(), group._memory is not None, flush=True)  # type: ignore[attr-defined]
    for step in range(1_000_000):
        if step == 3 and rank == 1 and what == "holds":
            held_up_here()
        if step == 3 and what == "ends":
            break
        value = torch.ones(4)
        try:
            group.all_reduce(value, "ones")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
            os._exit(3)
        assert value.tolist() == [2.0] * 4
        print("summed", flush=True)
    strategy.close()


main()
