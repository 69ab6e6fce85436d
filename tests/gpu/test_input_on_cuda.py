"""Batches are moved to the GPU ahead of the step, in order and complete. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as td

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("pinned", [False, True])
def test_batches_arrive_whole(ahead: int, pinned: bool) -> None:
    data = TensorDataset(torch.arange(2000.0).repeat_interleave(1024).view(2000, 1024))
    options = td.InputOptions(experimental_per_replica_buffer_size=ahead)
    with td.MirroredStrategy(["cuda:0#0", "cuda:0#1"]) as strategy:
        loader = DataLoader(data, batch_size=301, pin_memory=pinned)
        seen = []
        for (batch,) in strategy.experimental_distribute_dataset(loader, options):
            for part in strategy.experimental_local_results(batch):
                assert part.device == torch.device("cuda:0")
                busy = torch.randn(1024, 1024, device="cuda:0")
                for _ in range(20):  # keeps the stream of the step behind that of the copies
                    busy = busy @ busy.softmax(0)
                assert torch.equal(part[:, 0], part[:, -1])
                seen += part[:, 0].tolist()
    assert seen == [float(i) for i in range(2000)]


def test_batches_stay_where_they_are_on_request() -> None:
    options = td.InputOptions(experimental_fetch_to_device=False)
    with td.OneDeviceStrategy("cuda:0") as strategy:
        (batch,) = strategy.experimental_distribute_dataset([torch.ones(3)], options)
        assert batch.device.type == "cpu"
