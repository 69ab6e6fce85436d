"""Parity: a training gives the same weights on one device, on replicas in one process, and on ranks.

``max|dw| / max|w|`` after 50 steps is at most 1e-5 in float32 and 1e-10 in float64; all replicas have bitwise
the same weights, and so has every run.
"""

from __future__ import annotations

import pytest
import torch
from models import BATCH, CASES
from training import PLAIN, check_parity

import tfstyle_dist as td

HEAVY = ("gpt2", "lstm")
EVEN, UNEVEN = (6, 6), (6, 4, 2)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums over several threads may be split in another way on each replica."""
    torch.set_num_threads(1)


def _cases() -> list[object]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in HEAVY else n for n in CASES]


def _is_quick(name: str, optimizer: str) -> bool:
    return optimizer == "adam" or name not in HEAVY


all_combinations = [
    pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"]),
    pytest.mark.parametrize("optimizer", list(PLAIN)),
    pytest.mark.parametrize("name", _cases()),
]


def parametrized(function: object) -> object:
    """Every model with every optimizer in both dtypes."""
    for mark in all_combinations:
        function = mark(function)
    return function


@parametrized
def test_two_replicas_in_process(name: str, optimizer: str, dtype: torch.dtype) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        check_parity(strategy, name, optimizer, dtype, EVEN, "mean", twice=_is_quick(name, optimizer))


@pytest.mark.parametrize("reduction", ["sum", "tf"])
@parametrized
def test_three_replicas_with_uneven_batches(name: str, optimizer: str, dtype: torch.dtype, reduction: str) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        check_parity(strategy, name, optimizer, dtype, UNEVEN, reduction, twice=optimizer == "adam")


@pytest.mark.distributed(workers=2)
@parametrized
def test_two_ranks(name: str, optimizer: str, dtype: torch.dtype) -> None:
    with td.MirroredStrategy() as strategy:
        check_parity(strategy, name, optimizer, dtype, EVEN, "mean", twice=optimizer == "adam")


@pytest.mark.slow
@pytest.mark.distributed(workers=3)
@pytest.mark.parametrize(("reduction", "optimizer"), [("sum", "momentum"), ("tf", "adam")])
@pytest.mark.parametrize("name", list(CASES))
def test_three_ranks_with_uneven_batches(name: str, optimizer: str, reduction: str) -> None:
    with td.MirroredStrategy() as strategy:
        check_parity(strategy, name, optimizer, torch.float64, UNEVEN, reduction, twice=name == "parametrized")


@pytest.mark.parametrize("reduction", ["mean", "sum", "tf"])
@pytest.mark.parametrize("name", _cases())
def test_one_replica_is_bitwise_one_device(name: str, reduction: str) -> None:
    with td.OneDeviceStrategy("cpu:0") as strategy:
        check_parity(strategy, name, "adam", torch.float32, (BATCH,), reduction, tolerance=0.0, twice=False)
