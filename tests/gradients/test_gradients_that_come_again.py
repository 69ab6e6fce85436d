"""Ranks that send buckets during backward, and a layer whose gradient comes twice in one pass."""

from __future__ import annotations

import pytest
import torch
from this_replica import replica
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_replicas import assert_all_close, flat_gradients, gradients, plain

import tfstyle_dist as td


class _Net(nn.Module):
    """A layer that is used twice, each time behind a reentrant checkpoint, and one that is used by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.by_turns, self.shared = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)  # its gradients come first: outside of the checkpoints' own passes

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        h = self.first(x)
        h = self.by_turns(h) if uses else h
        for _ in range(2):
            h = checkpoint(self.shared, h, use_reentrant=True).tanh()
        return self.last(h).sum()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            td.MirroredStrategy,
            marks=pytest.mark.distributed(workers=2, timeout=50, deadline=15, env={"TFSTYLE_SHARED_MEMORY": "0"}),
        ),
        pytest.param(
            td.experimental.CentralStorageStrategy,
            marks=[pytest.mark.distributed(workers=2, timeout=50, deadline=15), pytest.mark.cpu_only("shares memory")],
        ),
    ],
)
@pytest.mark.parametrize("bytes_per_pack", [0, 8], ids=["one bucket", "a bucket each"])
def test_a_shared_layer_behind_reentrant_checkpoints(kind: type[td.Strategy], bytes_per_pack: int) -> None:
    """Its second gradient must not stand for that of a parameter which has none yet, or none at all."""
    with kind() as strategy:
        strategy.gradient_reducer.bytes_per_pack = bytes_per_pack
        with strategy.scope():
            model = plain(_Net)
        reference = plain(_Net)

        def step(k: int) -> None:
            model.zero_grad()
            model(torch.full((2, 3), replica() + k + 1.0, dtype=torch.float64) / 4, k % 2 == 0).backward()

        for k in range(4):
            strategy.run(step, args=(k,))
            reference.zero_grad()
            for number in range(2):
                x = torch.full((2, 3), number + k + 1.0, dtype=torch.float64) / 4
                (reference(x, k % 2 == 0) / 2).backward()
            assert_all_close(gradients(strategy, model), flat_gradients(reference))
