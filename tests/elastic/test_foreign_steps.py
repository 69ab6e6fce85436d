"""Steps as other people write them, in an elastic job of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.elastic.membership import MembershipChanged
from tfstyle_dist.elastic.values import ValueReader, ValueWriter


@pytest.fixture
def strategy() -> Iterator[Any]:
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2, check_every=1)) as made:
        yield made


def test_a_run_in_inference_mode_between_steps(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    def evaluate() -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        return model(torch.ones(2, 3)).mean()

    strategy.run(step)
    with torch.inference_mode():
        values = strategy.experimental_local_results(strategy.run(evaluate))
    before = model.weight.detach().clone()
    strategy.run(step)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * (2 + 0.9 * 2))
    assert len(values) == 2


def test_a_step_that_is_done_again_after_it_kept_a_tensor_of_inference_mode(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(3, 1)

    def step() -> None:
        with torch.inference_mode():
            model.last = model(torch.ones(2, 3))

    strategy.run(step)
    before, fails = model.last.clone(), [False, False, True]

    def disturbed() -> None:
        with torch.inference_mode():
            model.last.add_(1)
        if fails.pop():
            raise MembershipChanged("another worker died")

    strategy.run(disturbed)
    assert fails == []
    torch.testing.assert_close(model.last, before + 1)


def test_a_wrapper_of_an_optimizer_without_groups(strategy: Any) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    torch.testing.assert_close(model.weight.detach(), before - 2 * 0.1 * 2)


class Shapes(tuple[int, ...]):
    """As a package for rotations has them: a tuple that does not want to be counted."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_that_is_none(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        model.shapes = [Shapes((1, 2))]
    strategy.run(lambda: model(torch.ones(2, 3)).sum().backward())
    assert tuple.__len__(model.shapes[0]) == 2


def test_an_attribute_that_is_a_parameter_when_another_one_is_gone(strategy: Any) -> None:
    """Workers number their parameters alike, also where one of them has lost one."""
    with strategy.scope():
        old, model = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)

    def step() -> None:
        model.last = model.bias
        model(torch.ones(2, 3)).sum().backward()

    strategy.run(step)
    contents = strategy._elastic_steps.job._contents
    before = ValueWriter(contents).value(model.bias)
    del old
    strategy.run(step)
    assert ValueWriter(contents).value(model.bias) == before
    assert ValueReader(contents).value(before, None) is model.bias


class Graft:
    """Some optimizers keep objects of their own in their state."""

    def __init__(self) -> None:
        self.momentum, self.count = torch.zeros(1, 3), 0


def test_a_step_that_is_done_again_after_an_optimizer_made_an_object(strategy: Any) -> None:
    class Grafted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            state = self.state[model.weight]
            graft = state.setdefault("graft", Graft())
            graft.momentum.add_(model.weight.grad)
            graft.count += 1
            model.weight.grad.copy_(graft.momentum)
            super().step()

    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = Grafted([model.weight], lr=0.1)
    fails: list[bool] = []

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if fails and fails.pop():
            raise MembershipChanged("another worker died")

    before = model.weight.detach().clone()
    strategy.run(step)
    fails[:] = [False, False, True, False]  # the replica that comes last has made its update by then
    strategy.run(step)
    graft = optimizer.state[model.weight]["graft"]
    assert (graft.count, graft.momentum.tolist(), fails) == (2, [[4.0] * 3], [])
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * (2 + 4))
