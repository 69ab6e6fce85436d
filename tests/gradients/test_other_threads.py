"""A backward pass in a thread that the step function started, and closures that take arguments."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd


@pytest.fixture
def strategy() -> Iterator[tfd.Strategy]:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


def total(model: torch.nn.Linear) -> torch.Tensor:
    """The sum of what a layer gives, on the device of the replica whose turn it is."""
    return model(torch.ones(1, 2, device=model.weight.device)).sum()


def test_backward_in_another_thread_is_refused(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    with ThreadPoolExecutor(1) as pool:

        def step() -> None:
            pool.submit(lambda: total(model).backward()).result()

        with pytest.raises(RuntimeError, match="would stay those of one replica"):
            strategy.run(step)


def test_other_models_learn_in_other_threads(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    other = torch.nn.Linear(2, 1)
    with ThreadPoolExecutor(1) as pool:

        def step() -> torch.Tensor:
            loss = pool.submit(lambda: total(model)).result()
            pool.submit(lambda: total(other).backward()).result()
            loss.backward()
            return loss.detach()

        strategy.run(step)
    assert other.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


class _Asks(torch.optim.SGD):
    """Asks its closure for the loss without ``backward()`` too, as line searches do."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
            loss = closure(backward=False)
            assert torch.equal(loss, closure(False))
        super().step()
        return loss


@pytest.mark.parametrize("kind", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def test_a_closure_may_take_arguments(kind: Any) -> None:
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.ones_(model.weight)
            optimizer = _Asks(model.parameters(), lr=0.1)

        def step() -> None:
            def closure(backward: bool = True) -> torch.Tensor:
                loss = model(torch.ones(1, 2)).sum()
                if backward:
                    optimizer.zero_grad()
                    loss.backward()
                return loss

            optimizer.step(closure)

        strategy.run(step)
        assert torch.allclose(model.weight, torch.full((1, 2), 0.9))
