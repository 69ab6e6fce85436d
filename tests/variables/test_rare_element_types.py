"""Buffers of element types that cannot be added, such as float8: first values, ``sync_buffers``, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.train import Checkpoint

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]


class Scaled(torch.nn.Module):
    """A layer with a buffer of each type."""

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        for place, dtype in enumerate(TYPES):
            self.register_buffer(f"scale_{place}", torch.full((3,), number).to(dtype))

    def scales(self) -> list[list[float]]:
        return [self.get_buffer(f"scale_{place}").to(torch.float32).tolist() for place in range(len(TYPES))]

    def fill(self, number: float) -> None:
        for place, dtype in enumerate(TYPES):
            self.get_buffer(f"scale_{place}").copy_(torch.full((3,), number).to(dtype))


def all_are(number: float) -> list[list[float]]:
    return [[number] * 3] * len(TYPES)


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_ranks_begin_with_the_first_values_and_restore_them(rank: int, shared_tmp_path: Path) -> None:
    strategy = td.MirroredStrategy()
    with strategy.scope():
        model = Scaled(1.0 + rank)
    strategy.run(lambda: model.inner(torch.ones(1, 2)).sum().backward())
    assert model.scales() == all_are(1.0)
    model.fill(3.0 + rank)
    strategy.sync_buffers()
    assert model.scales() == all_are(3.0)
    checkpoint = Checkpoint(model=model)
    path = checkpoint.write(shared_tmp_path / "ckpt")
    model.fill(0.0)
    checkpoint.restore(path).assert_consumed()
    assert model.scales() == all_are(3.0)


def test_replicas_of_one_process(tmp_path: Path) -> None:
    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])

    def context() -> Any:
        return td.get_replica_context().replica_id_in_sync_group

    with strategy.scope():
        model = Scaled()
    strategy.run(lambda: model.fill(4.0 + context()))
    checkpoint = Checkpoint(model=model)
    path = checkpoint.write(tmp_path / "ckpt")
    strategy.sync_buffers()
    for own in strategy.experimental_local_results(strategy.run(model.scales)):
        assert own == all_are(4.0)
    model.fill(0.0)
    checkpoint.restore(path).assert_consumed()
    for own in strategy.experimental_local_results(strategy.run(model.scales)):
        assert own == all_are(4.0)
