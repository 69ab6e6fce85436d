"""Training as users of GPUs write it: mixed precision, fused optimizers, streams, memory. Run by ``check.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_kind import KIND
from on_replicas import built
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as td

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(KIND != "cuda", reason="needs a CUDA device")]
TWO = ["cuda:0#0", "cuda:0#1"]
LAYOUTS = pytest.mark.parametrize("devices", [["cuda:0"], TWO], ids=["one replica", "two replicas"])


class Images(nn.Module):
    """A convolution, a norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = nn.functional.max_pool2d(x, 4).flatten(2).transpose(1, 2)
        return self.last(self.attention(x).mean(1))


def batches(count: int = 4, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 3, 16, 16, generator=generator), torch.randint(0, 10, (rows,), generator=generator))
        for _ in range(count)
    ]


def trained(
    devices: Sequence[str] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    run: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step,
) -> list[torch.Tensor]:
    """The weights after some steps; without devices those of a loop without a strategy on the whole batches."""
    strategy = None if devices is None else td.MirroredStrategy(devices)
    if strategy is None:
        torch.manual_seed(0)
        model = prepare(Images().to("cuda"))
    else:
        model = prepare(built(strategy, Images))
    made = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16, init_scale=256.0)

    @run
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        made.zero_grad()
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(made)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(made)
        scaler.update()

    if strategy is None:
        for x, y in batches():
            step(x.cuda(), y.cuda())
    else:
        with strategy:
            for batch in strategy.experimental_distribute_dataset(batches()):
                strategy.run(step, args=batch)
            for parameter in model.parameters():
                copies = strategy.experimental_local_results(strategy.run(lambda p: p.detach().clone(), (parameter,)))
                assert all(torch.equal(copies[0], other) for other in copies)
    return [parameter.detach().cpu().float() for parameter in model.parameters()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-2, fused=True),
    "fused adamw, capturable": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2, fused=True, capturable=True),
    "foreach adam, capturable": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-2, foreach=True, capturable=True),
    "adam, learning rate on the device": lambda p: torch.optim.Adam(
        p, torch.tensor(1e-2, device="cuda"), eps=1e-2, fused=True
    ),
}


@LAYOUTS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_cuda(devices: list[str], name: str) -> None:
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(trained(devices, OPTIMIZERS[name]), trained(None, OPTIMIZERS[name]), **close)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision(devices: list[str], dtype: torch.dtype) -> None:
    rough = {"rtol": 5e-2, "atol": 5e-3}
    torch.testing.assert_close(trained(devices, sgd, dtype), trained(None, sgd, dtype), **rough)


@LAYOUTS
def test_channels_last(devices: list[str]) -> None:
    def prepare(model: nn.Module) -> nn.Module:
        return model.to(memory_format=torch.channels_last)

    found, expected = trained(devices, sgd, prepare=prepare), trained(None, sgd, prepare=prepare)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@LAYOUTS
def test_a_step_on_a_stream_of_its_own(devices: list[str]) -> None:
    side = torch.cuda.Stream()

    def on_the_side(step: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: torch.Tensor) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step(*args)
            torch.cuda.current_stream().wait_stream(side)

        return called

    found, expected = trained(devices, sgd, run=on_the_side), trained(None, sgd)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@LAYOUTS
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_and_pinned_memory(devices: list[str], workers: int) -> None:
    data = TensorDataset(torch.arange(4096.0).view(64, 64))
    loader = DataLoader(data, batch_size=10, num_workers=workers, pin_memory=True)
    with td.MirroredStrategy(devices) as strategy:
        seen: list[float] = []
        for (batch,) in strategy.experimental_distribute_dataset(loader):
            for part in strategy.experimental_local_results(batch):
                assert part.device == torch.device("cuda:0")
                seen += part.reshape(-1).tolist()
    assert seen == list(range(4096))


def test_sparse_gradients() -> None:
    def weights(devices: list[str]) -> torch.Tensor:
        with td.MirroredStrategy(devices) as strategy:
            table = built(strategy, lambda: nn.Embedding(50, 8, sparse=True))
            optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)

            def step(ids: torch.Tensor) -> None:
                optimizer.zero_grad()
                table(ids).square().sum(-1).mean().backward()
                optimizer.step()

            rows = torch.arange(8).repeat(2, 1).T.contiguous()
            for ids in strategy.experimental_distribute_dataset([rows] * 3):
                strategy.run(step, args=(ids,))
            return table.weight.detach().cpu()

    torch.testing.assert_close(weights(TWO), weights(["cuda:0"]), rtol=1e-4, atol=1e-5)


@LAYOUTS
def test_memory_does_not_grow_with_steps(devices: list[str]) -> None:
    """And one replica costs as much as a loop without a strategy, within the allocator's rounding."""

    def used(devices: list[str] | None) -> list[int]:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        strategy = None if devices is None else td.MirroredStrategy(devices)
        if strategy is None:
            model: nn.Module = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda()
        else:
            with strategy.scope():
                model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        x = torch.ones(4, 2048, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        found = []
        for number in range(12):
            step() if strategy is None else strategy.run(step)
            if number in (3, 11):
                found.append(torch.cuda.memory_allocated() - before)
        if strategy is not None:
            strategy.close()
        return found

    early, late = used(devices)
    assert late <= early
    if len(devices) == 1:
        plain = used(None)[1]
        assert late <= plain * 1.02


def test_a_graph_of_a_step_of_one_replica() -> None:
    """What CUDA captures and replays trains as the step itself does."""

    def weights(captured: bool) -> list[torch.Tensor]:
        with td.OneDeviceStrategy("cuda:0") as strategy:
            model = built(strategy, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).cuda()

            def step() -> None:
                optimizer.zero_grad(set_to_none=False)
                model(x).square().mean().backward()
                optimizer.step()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    strategy.run(step)
            torch.cuda.current_stream().wait_stream(side)
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    strategy.run(step)
                for _ in range(4):
                    graph.replay()
            else:
                for _ in range(4):
                    strategy.run(step)
            return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(weights(True), weights(False))
