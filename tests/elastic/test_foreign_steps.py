"""Steps as other people write them, in an elastic job of one worker."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.elastic.membership.membership import MembershipChanged
from tfstyle_dist.elastic.state.serialized_values import ValueReader, ValueWriter


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


class Holder:
    """An object of a class that nobody but the program knows."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int
    last: Any = None


class Plain:
    def __init__(self, calls: int, last: Any = None) -> None:
        self.calls, self.last = calls, last


class Attributes(dict[str, Any]):
    """A dict whose entries are read as attributes, as many programs have one."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]

    def __init__(self, calls: int, last: Any = None) -> None:
        super().__init__(calls=calls, last=last)


def named(calls: int, last: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(calls=calls, last=last)


@pytest.mark.parametrize("kind", [Plain, Slotted, Attributes, named])
@pytest.mark.parametrize("last", [None, "tensor"])
@pytest.mark.parametrize("makes", [[1], [1, 2, 3]], ids=["once", "always"])
def test_a_step_that_is_done_again_after_one_that_made_an_object(
    strategy: Any, kind: Any, last: Any, makes: list[int]
) -> None:
    with strategy.scope():
        trainer = Holder(model=torch.nn.Linear(1, 1), counter=kind(0))
    fails: list[bool] = []

    def step() -> int:
        trainer.counter.calls += 1
        if trainer.counter.calls in makes:
            trainer.counter = kind(trainer.counter.calls, None if last is None else torch.ones(1))
        if fails and fails.pop():
            raise MembershipChanged("another worker died")
        return trainer.counter.calls

    for calls in range(1, 7):
        if calls in (2, 6):  # after one that made it, and after some that kept it
            fails[:] = [False, False, True, False]  # the second replica has counted by then
        assert set(strategy.experimental_local_results(strategy.run(step))) == {calls}


def _made(what: str, model: torch.nn.Module) -> Any:
    layer = torch.nn.Linear(2, 1)
    return {
        "module": layer,
        "parameter": torch.nn.Parameter(torch.ones(1)),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "in a list": [1, {"teacher": layer}],
        "in a deque": deque([layer]),
        "held": Holder(layer=layer),
        "in slots": Slotted(0, layer),
    }[what]


@pytest.mark.parametrize("what", ["module", "parameter", "optimizer", "in a list", "in a deque", "held", "in slots"])
@pytest.mark.parametrize("first", [0, 2])
def test_what_a_step_makes_and_keeps_is_refused(strategy: Any, what: str, first: int) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)

    def step(number: int) -> None:
        _made(what, model)  # not kept
        model(torch.ones(1, 2)).sum().backward()
        if number == first:
            model.kept = _made(what, model)

    for number in range(first):
        strategy.run(step, args=(number,))
    with pytest.raises(NotImplementedError, match=r"keeps it in the attribute 'kept' of Linear\. .* in strategy"):
        strategy.run(step, args=(first,))


def test_a_tuple_that_does_not_want_to_be_counted_may_be_kept(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)

    def step() -> None:
        model.kept = Shapes((1, 2))
        model(torch.ones(1, 2)).sum().backward()

    for _ in range(2):
        strategy.run(step)
    assert type(model.kept) is Shapes


def test_what_was_made_before_the_first_step_may_change_its_place(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        model.branches = [torch.nn.Linear(2, 1) for _ in range(2)]
    state = Holder(now=None, model=model)

    def step(number: int) -> None:
        state.now = model.branches[number % 2]
        state.now(torch.ones(1, 2)).sum().backward()

    for number in range(3):
        strategy.run(step, args=(number,))
    assert state.now is model.branches[0]


def test_a_step_that_is_done_again_after_it_hung_hooks_and_attributes_on_a_parameter(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    model.weight.count = torch.zeros(1)
    fails = [False, False, False, True]  # the replica that comes last; the other one is at its end then

    def step() -> None:
        model.zero_grad()
        hook = model.weight.register_hook(lambda gradient: 2 * gradient)
        model.weight.count = model.weight.count + 1
        model.bias.seen = "in this step"
        model(torch.ones(1, 2)).sum().backward()
        if fails and fails.pop(0):
            raise MembershipChanged("another worker died")
        hook.remove()

    for number in range(1, 3):
        strategy.run(step)
        counts = strategy.experimental_local_results(strategy.run(lambda: model.weight.count.clone()))
        assert [float(count) for count in counts] == [number, number]
        assert model.weight.grad.tolist() == [[2.0, 2.0]]
    assert not fails
