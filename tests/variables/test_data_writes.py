"""Writes through ``.data`` in cross-replica context, which leave no mark on the tensor, reach all replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import tfstyle_dist as tfd

Find = Callable[["Program"], torch.Tensor]


class Program:
    """A model with a buffer, a list and batch norm, and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.model.register_buffer("scale", torch.ones(4))
        self.model.tables = {"first": [torch.ones(3)]}
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        replica = tfd.get_replica_context().replica_id_in_sync_group
        self.optimizer.zero_grad()
        self.model(torch.tensor([[1.0, 2.0], [0.5, -1.0]]) + replica).square().sum().backward()
        self.optimizer.step()


@pytest.fixture
def strategy() -> Iterator[tfd.MirroredStrategy]:
    made = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()


@pytest.fixture
def program(strategy: tfd.MirroredStrategy) -> Program:
    with strategy.scope():
        made = Program()
    strategy.run(made.step)
    return made


TENSORS: dict[str, Find] = {
    "a buffer": lambda program: program.model.scale,
    "a buffer, detached": lambda program: program.model.scale.detach(),
    "a part of a buffer": lambda program: program.model.scale[1:3],
    "statistics": lambda program: program.model[1].running_mean,
    "a gradient": lambda program: program.model[0].weight.grad,
    "an optimizer's tensor": lambda program: program.optimizer.state[program.model[0].weight]["exp_avg"],
    "in a list in a dict": lambda program: program.model.tables["first"][0],
    "of a state dict": lambda program: program.model.state_dict()["0.weight"],
    "of a state dict, a buffer": lambda program: program.model.state_dict()["scale"],
    "a detached parameter": lambda program: program.model[0].weight.detach(),
}
SAME = {
    name: find for name, find in TENSORS.items() if not any(word in name for word in ("detached", "part", "state dict"))
}
"""What is the same tensor each time."""
WHOLE = {name: find for name, find in TENSORS.items() if name not in ("a buffer, detached", "a part of a buffer")}


def check(strategy: tfd.MirroredStrategy, program: Program, find: Find) -> None:
    """Each replica has what cross-replica context shows."""
    shown = find(program).detach().clone()
    for own in strategy.experimental_local_results(strategy.run(lambda: find(program).detach().clone())):
        torch.testing.assert_close(own.to(shown.device), shown, rtol=0, atol=0)


@pytest.mark.parametrize("find", TENSORS.values(), ids=TENSORS.keys())
def test_what_is_written_through_data(strategy: tfd.MirroredStrategy, program: Program, find: Find) -> None:
    for factor in (3.0, 5.0):
        find(program).data.fill_(factor)
        check(strategy, program, find)
        strategy.run(program.step)


@pytest.mark.parametrize("find", TENSORS.values(), ids=TENSORS.keys())
def test_data_that_is_read_again_before_it_is_written(
    strategy: tfd.MirroredStrategy, program: Program, find: Find
) -> None:
    """As running averages do; the write was lost, since only what had been read last was looked at."""
    program.optimizer.zero_grad = lambda: None  # gradients stay where they are
    for factor in (3.0, 5.0):
        with torch.no_grad():
            find(program).data.copy_(find(program).data * factor + 1.0)
        check(strategy, program, find)
        strategy.run(program.step)


@pytest.mark.parametrize("find", WHOLE.values(), ids=WHOLE.keys())
def test_through_data_that_the_program_kept_over_a_run(
    strategy: tfd.MirroredStrategy, program: Program, find: Find
) -> None:
    program.optimizer.zero_grad = lambda: None  # gradients stay where they are
    kept = [find(program).data]
    for factor in (3.0, 5.0):
        strategy.run(program.step)
        kept[0].fill_(factor)
        check(strategy, program, find)


@pytest.mark.parametrize("find", SAME.values(), ids=SAME.keys())
def test_data_that_is_set(strategy: tfd.MirroredStrategy, program: Program, find: Find) -> None:
    assert find(program) is find(program)
    first = find(program).data
    find(program).data = torch.full_like(first, 2.0)
    first.fill_(7.0)
    find(program).data = first  # the memory that it had, with other values
    check(strategy, program, find)


def test_who_only_looks_leaves_each_replica_what_it_has(strategy: tfd.MirroredStrategy, program: Program) -> None:
    norm = program.model[1]

    def means() -> tuple[torch.Tensor, ...]:
        return strategy.experimental_local_results(strategy.run(lambda: norm.running_mean.clone()))

    before = means()
    assert not torch.equal(*(own.cpu() for own in before))
    kept = norm.running_mean.data
    assert float(kept.sum() + norm.running_mean.data.sum())
    for own, then in zip(means(), before, strict=True):
        torch.testing.assert_close(own, then, rtol=0, atol=0)


def test_what_a_step_writes_to_kept_data_is_no_write_of_the_program(
    strategy: tfd.MirroredStrategy, program: Program
) -> None:
    norm = program.model[1]
    kept = norm.running_mean.data

    def step() -> torch.Tensor:
        kept.add_(0.0)
        norm(torch.full((2, 2), float(tfd.get_replica_context().replica_id_in_sync_group)))
        return norm.running_mean.clone()

    strategy.run(step)
    means = strategy.experimental_local_results(strategy.run(lambda: norm.running_mean.clone()))
    assert not torch.equal(*(own.cpu() for own in means))


def test_tensors_that_nobody_holds_are_let_go(strategy: tfd.MirroredStrategy, program: Program) -> None:
    given = [weakref.ref(torch.ones(3).data) for _ in range(200)]
    given += [weakref.ref(program.model.scale.data) for _ in range(200)]
    assert sum(reference() is not None for reference in given) <= 8
    strategy.run(program.step)
    assert given[-1]() is None


@pytest.mark.parametrize("now", ["gone", "elsewhere"])
def test_memory_that_was_content_and_is_no_longer(strategy: tfd.MirroredStrategy, program: Program, now: str) -> None:
    weight = program.model[0].weight
    memory = torch.zeros_like(weight, requires_grad=False)
    weight.grad = memory.detach()
    weight.grad.data.zero_()
    if now == "gone":
        weight.grad = None
    else:
        weight.grad.data = torch.ones_like(memory)
    given = weakref.ref(memory.data)
    assert given() is None
    strategy.run(program.step)


def test_each_of_many_reads_may_be_a_write(strategy: tfd.MirroredStrategy, program: Program) -> None:
    program.model.scale.data.fill_(2.0)
    assert [float(program.model.scale.data[0]) for _ in range(3)] == [2.0, 2.0, 2.0]
    check(strategy, program, TENSORS["a buffer"])


@pytest.mark.cpu_only("what torch makes of the function is the same on devices")
def test_data_in_functions_of_torch_func(strategy: tfd.MirroredStrategy, program: Program) -> None:
    gradient = torch.func.grad(lambda x: (x * x.data).sum())(torch.tensor([2.0, 3.0]))
    assert gradient.tolist() == [2.0, 3.0]


@pytest.mark.cpu_only("what torch makes of the function is the same on devices")
@pytest.mark.parametrize("full", [True, False])
def test_data_in_compiled_functions(strategy: tfd.MirroredStrategy, program: Program, full: bool) -> None:
    @torch.compile(backend="eager", fullgraph=full)
    def double(x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)
        return x.data + 1

    value = torch.ones(2)
    assert double(value).tolist() == [3.0, 3.0]
    assert value.tolist() == [2.0, 2.0]
