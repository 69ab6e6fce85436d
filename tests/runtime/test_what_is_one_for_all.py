"""What a process has once, and a replica that waits holds: the error of the next one says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import tfstyle_dist as td


def _loop(model: torch.nn.Module) -> Callable[[], Any]:
    loop = asyncio.new_event_loop()

    async def forward_and_backward() -> None:
        model(torch.ones(1, 1)).sum().backward()

    def step() -> None:
        coroutine = forward_and_backward()
        try:
            loop.run_until_complete(coroutine)
        finally:
            coroutine.close()
            if not loop.is_running():
                loop.close()

    return step


def _level(model: torch.nn.Module) -> Callable[[], Any]:
    def step() -> None:
        with forward_ad.dual_level():
            model(torch.ones(1, 1)).sum().backward()

    return step


CASES = {
    "This event loop is already running": (_loop, "Write asyncio.run(...) in the step"),
    "Nested forward mode AD": (_level, "or use torch.func.jvp"),
}


@pytest.mark.parametrize("says", CASES)
def test_the_error_says_what_to_write(says: str) -> None:
    make, instead = CASES[says]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            step = make(torch.nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match=says) as caught:
            strategy.run(step)
    assert instead in caught.value.__notes__[1]


def test_what_to_write_instead_works() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(1, 1)

        async def forward_and_backward() -> None:
            await asyncio.sleep(0)
            model(torch.ones(1, 1)).sum().backward()

        def step() -> torch.Tensor:
            asyncio.run(forward_and_backward())
            return torch.func.jvp(model, (torch.ones(1, 1),), (torch.ones(1, 1),))[1].detach()

        found = strategy.experimental_local_results(strategy.run(step))
        assert all(torch.equal(value, model.weight) for value in found)
