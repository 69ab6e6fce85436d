"""Replicas of one process that make different calls: all raise, and the message says who called what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_steps import (
    THREE,
    all_reduce,
    assert_usable,
    build,
    merge,
    replica_id,
)

import tfstyle_dist as td
from tfstyle_dist.core.errors import CollectiveMismatchError

pytestmark = pytest.mark.timeout(60)


def test_three_replicas_make_three_different_calls() -> None:
    with td.MirroredStrategy(THREE) as strategy:

        def step() -> None:
            if replica_id() == 0:
                all_reduce()
            elif replica_id() == 1:
                merge()

        with pytest.raises(CollectiveMismatchError) as caught:
            strategy.run(step)
        lines = str(caught.value).splitlines()
        assert_line(lines, "replica 0: all_reduce at ", line_of(all_reduce, 3))
        assert_line(lines, "replica 1: merge_call at ", line_of(merge, 3))
        assert_line(lines, "replica 2: has not come to a call yet")
        assert_usable(strategy)


def line_of(function: Any, offset: int) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"


def assert_line(lines: list[str], *parts: str) -> None:
    assert any(all(part in line for part in parts) for line in lines), "\n".join(lines)


@pytest.mark.parametrize("stepping", [0, 1])
def test_only_one_replica_steps(two: Any, stepping: int) -> None:
    model, optimizer = build(two)

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        if replica_id() == stepping:
            optimizer.step()

    with pytest.raises(CollectiveMismatchError, match=f"replica {stepping}: SGD.step at {__file__}:"):
        two.run(step)


@pytest.mark.parametrize("other", [0, 1])
def test_only_one_replica_calls_backward(two: Any, other: int) -> None:
    model, _ = build(two)

    def step() -> None:
        loss = model(torch.ones(1, 1)).sum()
        if replica_id() != other:
            loss.backward()

    with pytest.raises(CollectiveMismatchError) as caught:
        two.run(step)
    lines = str(caught.value).splitlines()
    assert_line(lines, f"replica {1 - other}: gradient reduction at ", __file__)
    assert_line(lines, f"replica {other}: finished without another call")


def test_different_optimizers_step(two: Any) -> None:
    model, sgd = build(two)
    adam = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        (sgd if replica_id() == 0 else adam).step()

    with pytest.raises(CollectiveMismatchError, match=r"replica 0: SGD\.step(.|\n)*replica 1: Adam\.step"):
        two.run(step)


def test_shapes_that_differ_name_the_replica(two: Any) -> None:
    def step() -> None:
        replica = td.get_replica_context()
        assert replica is not None
        replica.all_reduce("SUM", torch.ones(2 + replica_id()))

    with pytest.raises(ValueError, match=r"contribution 1 has shape \(3,\) but contribution 0 has \(2,\)"):
        two.run(step)


def test_different_number_of_calls(two: Any) -> None:
    def step() -> None:
        for _ in range(1 + replica_id()):
            merge()

    with pytest.raises(CollectiveMismatchError, match="different number of merge_call"):
        two.run(step)
