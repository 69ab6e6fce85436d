"""Replicas on GPUs: two on one device, and one on each of two. Run with ``pytest -m gpu``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tfstyle_dist as td

pytestmark = pytest.mark.gpu


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(devices: list[str], steps: int = 20) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights after training on one device in plain PyTorch, and on the given replicas."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator)
    alone = build().to("cuda:0")
    plain = torch.optim.Adam(alone.parameters(), lr=1e-2, foreach=False)
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = copy.deepcopy(build()).to("cuda:0")
            strategy.experimental_adopt(model)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
        xs, ys = x.chunk(len(devices)), y.chunk(len(devices))

        def place(ctx: td.experimental.ValueContext) -> tuple[torch.Tensor, torch.Tensor]:
            where = strategy.worker.torch_device(ctx.replica_id_in_sync_group)
            return xs[ctx.replica_id_in_sync_group].to(where), ys[ctx.replica_id_in_sync_group].to(where)

        data = strategy.experimental_distribute_values_from_function(place)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        for _ in range(steps):
            strategy.run(step, args=data)
            plain.zero_grad()
            nn.functional.cross_entropy(alone(x.to("cuda:0")), y.to("cuda:0")).backward()
            plain.step()
        return [p.detach().cpu() for p in alone.parameters()], [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("devices", [["cuda:0#0", "cuda:0#1"], ["/gpu:0", "/gpu:1"]])
def test_replicas_equal_one_device(devices: list[str]) -> None:
    if torch.cuda.device_count() < len({d.partition("#")[0] for d in devices}):
        pytest.skip(f"needs the devices {devices}")
    expected, found = train(devices)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_all_reduce_on_one_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with td.MirroredStrategy(["cuda:0#0", "cuda:0#1"]) as strategy:

        def step() -> torch.Tensor:
            context = td.get_replica_context()
            assert context is not None
            return context.all_reduce("SUM", torch.full((3,), context.replica_id_in_sync_group + 1.0, device="cuda:0"))

        for result in strategy.experimental_local_results(strategy.run(step)):
            assert result.device.type == "cuda"
            torch.testing.assert_close(result.cpu(), torch.full((3,), 3.0))
