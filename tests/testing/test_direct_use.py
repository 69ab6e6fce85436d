"""The plugin in this session itself, as the other tests of the package use it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.mark.distributed(workers=2, deadline=20)
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_reduce(rank: int, world_size: int, shared_tmp_path: Path, dtype: torch.dtype) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TFSTYLE_RENDEZVOUS_FILE']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(os.environ["TFSTYLE_TIMEOUT_SECONDS"])),
    )
    values = torch.arange(3).to(dtype) + rank
    dist.all_reduce(values)
    assert values.tolist() == [1, 3, 5]
    (shared_tmp_path / str(rank)).touch(exist_ok=False)
    dist.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]
