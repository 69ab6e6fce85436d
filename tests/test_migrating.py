"""docs/migrating.md: the programs before and after train to the same weights."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import said_by_first
from document_blocks import DOCS, Block, blocks_of
from example_runs import on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tfstyle_dist as tfd
from tfstyle_dist.core import network


def programs(test: str) -> list[Block]:
    """The blocks that name this test."""
    found = [block for block in blocks_of(DOCS / "migrating.md") if block.run_by.endswith(f"::{test}")]
    assert found, test
    return found


def names() -> dict[str, Any]:
    """What the programs take for granted."""
    torch.manual_seed(3)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    given = {"torch": torch, "tfd": tfd, "dist": dist, "data": data, "DataLoader": DataLoader}
    return {**given, "DistributedDataParallel": DistributedDataParallel, "DistributedSampler": DistributedSampler}


def executed(source: str) -> tuple[dict[str, Any], str]:
    """The names that a program leaves, and what it prints."""
    namespace, printed = names(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/migrating.md", "exec"), namespace)
    return namespace, printed.getvalue()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.distributed(workers=2)
def test_from_ddp(rank: int, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = programs("test_from_ddp")
    port = said_by_first(rank, shared_tmp_path / "port", lambda: network.free_ports(1)[0])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    theirs, said_before = executed(before.source)
    ours, said_after = executed(after.source)
    torch.testing.assert_close(weights(ours["model"]), weights(theirs["model"]))
    if rank == 0:
        losses = [float(*re.findall(r"^loss (\S+)$", text)) for text in (said_before, said_after)]
        assert losses[0] == pytest.approx(losses[1])


@on_ranks(0)
def test_from_accelerate() -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("tfstyle_dist.integrations.accelerate")
    assert "RANK" not in os.environ
    before, line = programs("test_from_accelerate")
    theirs, _ = executed(before.source)
    ours, _ = executed(before.source.replace("from accelerate import Accelerator\n", line.source))
    assert "StrategyAccelerator" in str(ours["Accelerator"])
    torch.testing.assert_close(weights(ours["model"]), weights(theirs["model"]))
