"""Sparse buffers in functions of workers: servers do not hold them, each worker has its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")]


def test_they_travel_with_the_module(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    nodes = torch.arange(12.0).reshape(4, 3)
    with c.strategy.scope():
        model = nn.Linear(3, 2)
        model.register_buffer("rows", torch.eye(4).to_sparse())
        model.register_buffer("columns", torch.eye(4).to_sparse_csr())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = nn.Linear(3, 2)
    alone.load_state_dict({name: value for name, value in model.state_dict().items() if "." not in name}, strict=False)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(model.rows.to_dense() @ model.columns.to_dense() @ nodes).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        c.coordinator.schedule(step).fetch()
    step()  # the coordinator's own program has them too
    for _ in range(3):
        theirs.zero_grad()
        alone(nodes).square().mean().backward()
        theirs.step()
    torch.testing.assert_close(model.weight.detach().clone(), alone.weight.detach())
