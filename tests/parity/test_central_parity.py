"""Central storage gives the weights of one device, in one process and on ranks."""

from __future__ import annotations

import pytest
import torch
from models import CASES
from training import check_parity

import tfstyle_dist as td
from tfstyle_dist.runtime.worker import Worker

HEAVY = ("gpt2", "lstm")
QUICK = [n for n in CASES if n not in HEAVY]
EVEN, UNEVEN = (6, 6), (6, 4, 2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums over several threads may be split in another way on each replica."""
    torch.set_num_threads(1)


@DTYPES
@pytest.mark.parametrize("name", QUICK)
def test_two_replicas_in_process(name: str, dtype: torch.dtype) -> None:
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        check_parity(strategy, name, "adam", dtype, EVEN, "mean", twice=False)


@pytest.mark.parametrize(("optimizer", "reduction"), [("momentum", "sum"), ("adam", "tf")])
@pytest.mark.parametrize("name", QUICK)
def test_three_replicas_with_uneven_batches(name: str, optimizer: str, reduction: str) -> None:
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        check_parity(strategy, name, optimizer, torch.float64, UNEVEN, reduction, twice=False)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=["one", "two"])
@pytest.mark.parametrize(("optimizer", "reduction"), [("adam", "mean"), ("momentum", "tf")])
@pytest.mark.parametrize("name", QUICK)
def test_replicas_that_compute_with_copies(
    name: str, optimizer: str, reduction: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where values have to be copied for each step and gradients come back."""
    monkeypatch.setattr(Worker, "computes_elsewhere", lambda worker, home: True)
    with td.experimental.CentralStorageStrategy(devices) as strategy:
        sizes = EVEN if len(devices) == 2 else (12,)
        check_parity(strategy, name, optimizer, torch.float64, sizes, reduction, twice=False)
        contents = strategy.parameter_store.contents
        assert contents is not None
        held = [vessel.numel() for row in contents.rows._vessels for vessel in row]
        assert not any(held), "a compute device holds the weights while a step runs only"


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@DTYPES
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(name: str, dtype: torch.dtype, optimizer: str) -> None:
    with td.experimental.CentralStorageStrategy() as strategy:
        check_parity(strategy, name, optimizer, dtype, EVEN, "mean", twice=False)


@pytest.mark.slow
@pytest.mark.distributed(workers=3, timeout=150, deadline=60)
@pytest.mark.parametrize(("optimizer", "reduction"), [("momentum", "sum"), ("adam", "tf")])
@pytest.mark.parametrize("name", QUICK)
def test_three_ranks_with_uneven_batches(name: str, optimizer: str, reduction: str) -> None:
    with td.experimental.CentralStorageStrategy() as strategy:
        check_parity(strategy, name, optimizer, torch.float64, UNEVEN, reduction, twice=False)
