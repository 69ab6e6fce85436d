"""The imagined group, and the group of one."""

from __future__ import annotations

import pytest
import torch

from tfstyle_dist.comm import FakeGroup, SingleGroup, WorkerGroup


def test_operations_of_the_fake() -> None:
    group = FakeGroup(rank=1, size=4)
    buffer = torch.arange(8.0)
    group.all_reduce(buffer, "sum")
    assert buffer.tolist() == [4.0 * i for i in range(8)]
    assert [t.tolist() for t in group.all_gather(torch.ones(1), "gather")] == [[1.0]] * 4
    assert group.reduce_scatter(torch.arange(8.0), "scatter").tolist() == [8.0, 12.0]
    group.broadcast(buffer, 0, "start")
    group.send(buffer, 2, "there")
    group.recv(buffer, 2, "back")
    assert group.gather_objects({"a": 1}, "objects") == [{"a": 1}] * 4
    group.agree("anything", "all_reduce")
    assert group.log == [
        ("all_reduce", "sum", 8),
        ("all_gather", "gather", 1),
        ("reduce_scatter", "scatter", 8),
        ("broadcast", "start", 8),
        ("send", "there", 8),
        ("recv", "back", 8),
    ]


def test_life_of_the_fake() -> None:
    group = FakeGroup(rank=1, size=4)
    assert len(group.members()) == 4
    part = group.split([[0, 2], [3, 1]])
    assert (part.rank, part.size) == (1, 2)
    group.report_failure("out of memory")
    assert group.log[-1] == ("failure", "out of memory", 0)
    assert group.errored() is None
    group.abort()
    assert group.errored() is not None
    with pytest.raises(RuntimeError, match="aborted"):
        group.all_reduce(torch.ones(1), "late")
    group.close()


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_a_rank_outside_the_group(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} does not fit a group of 4: it counts from 0 to 3"):
        FakeGroup(rank, 4)


def test_group_of_one() -> None:
    group: WorkerGroup = SingleGroup()
    buffer = torch.ones(3)
    group.all_reduce(buffer, "x")
    group.broadcast(buffer, 0, "x")
    assert buffer.tolist() == [1.0] * 3
    (gathered,) = group.all_gather(buffer, "x")
    scattered = group.reduce_scatter(buffer, "x")
    gathered.zero_()
    scattered.zero_()
    assert buffer.tolist() == [1.0] * 3
    assert group.gather_objects(5, "x") == [5]
    assert group.split([[0]]) is group
    for call in (group.send, group.recv):
        with pytest.raises(ValueError, match="this group has one worker only"):
            call(buffer, 1, "x")
