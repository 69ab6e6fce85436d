"""A program that looks at its model in inference mode first, and trains it after that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as tfd

Strategies = tfd.MirroredStrategy | tfd.experimental.CentralStorageStrategy


@pytest.mark.cpu_only("the pretend accelerator does not compute in inference mode")
@pytest.mark.parametrize("kind", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_was_first_seen_in_inference_mode_is_trained(kind: type[Strategies], count: int) -> None:
    x = torch.arange(24.0).view(6, 4) / 24
    with kind([f"cpu:{number}" for number in range(count)]) as strategy:
        with strategy.scope():
            torch.manual_seed(1)
            model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
            model.register_buffer("whole", torch.zeros(6))
            model.part = model.whole[2:4]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            (model(x) + model.part.sum()).square().mean().backward()
            optimizer.step()
            model.part.add_(0.1)

        with torch.inference_mode():
            strategy.run(lambda: model.eval()(x))
        model.train()
        strategy.run(step)
        strategy.run(step)
        found = [*strategy.experimental_local_results(strategy.run(lambda: model[0].weight.detach().clone()))]
        parts = [*strategy.experimental_local_results(strategy.run(lambda: model.whole.clone()))]
    torch.manual_seed(1)
    own: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    of_own = torch.optim.Adam(own.parameters(), lr=0.1)
    for shift in (0.0, 0.2):
        of_own.zero_grad()
        (own(x) + shift).square().mean().backward()
        of_own.step()
    for weight, part in zip(found, parts, strict=True):
        torch.testing.assert_close(weight, own[0].weight.detach())
        torch.testing.assert_close(part, torch.tensor([0.0, 0.0, 0.2, 0.2, 0.0, 0.0]))


@pytest.mark.cpu_only("the pretend accelerator does not compute in inference mode")
@pytest.mark.parametrize(
    ("kind", "outside"),
    [(tfd.MirroredStrategy, False), (tfd.MirroredStrategy, True), (tfd.experimental.CentralStorageStrategy, False)],
)
def test_weights_that_are_moved_in_inference_mode(kind: type[Strategies], outside: bool) -> None:
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(1.0)

        @torch.inference_mode()
        def move() -> torch.Tensor:
            for parameter in model.parameters():
                parameter.data = parameter.data + 1.0
                parameter.data.mul_(2.0)
            return model(torch.ones(1, 2)) - model.bias

        for _ in range(2):
            if outside:
                move()
            else:
                strategy.run(move)
        found = strategy.run(lambda: model(torch.ones(1, 2)).detach() - model.bias.detach())
        assert [float(value) for value in strategy.experimental_local_results(found)] == [20.0, 20.0]
