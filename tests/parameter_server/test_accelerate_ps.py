"""An accelerate script whose parameters and optimizer state live on parameter servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from tfstyle_dist.integrations.accelerate import StrategyAccelerator

pytestmark = pytest.mark.timeout(90)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(net: Any, optimizer: Any, scheduler: Any, steps: int, accelerator: Any = None) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        if accelerator is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        else:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def prepared(net: Any) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def test_a_script_trains_on_the_servers(cluster: Any, tmp_path: Path) -> None:
    strategy = cluster(workers=1, ps=2).strategy
    plain = model()
    expected = train(*prepared(plain), steps=5)
    try:
        accelerator = StrategyAccelerator(strategy=strategy, cpu=True)
        own = model()
        net, optimizer, scheduler = accelerator.prepare(*prepared(own))
        torch.testing.assert_close(train(net, optimizer, scheduler, 5, accelerator), expected)
        assert accelerator.unwrap_model(net) is own
        momentum = [optimizer.state[p]["momentum_buffer"] for p in own.parameters()]  # which is on the servers
        assert all(buffer.abs().sum() > 0 for buffer in momentum)
        weights = {name: tensor.detach().clone() for name, tensor in accelerator.get_state_dict(net).items()}
        torch.testing.assert_close(weights, dict(plain.state_dict()))
        accelerator.save_state(str(tmp_path))
        train(net, optimizer, scheduler, 2, accelerator)
        assert not torch.equal(own[0].weight.detach().clone(), weights["0.weight"])
        accelerator.load_state(str(tmp_path))
        assert torch.equal(own[0].weight.detach().clone(), weights["0.weight"])
    finally:
        for state in (PartialState, AcceleratorState, GradientState):
            state._shared_state.clear()
