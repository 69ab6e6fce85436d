"""Gradients of the collective calls, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as td

SIZES = (3, 1, 2)  # rows on each replica


def weights(replica_id: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 2, dtype=torch.float64).view(rows, 2) + 10.0 * (replica_id + 1)


def value(replica_id: int, rows: int) -> torch.Tensor:
    return torch.sin(weights(replica_id, rows)).requires_grad_()


def context() -> Any:
    replica = td.get_replica_context()
    assert replica is not None
    return replica


def reduced(op: str) -> torch.Tensor:
    """Replica r's loss is <w_r, all_reduce(x)^2>; returns the gradient of x."""
    replica = context()
    r = replica.replica_id_in_sync_group
    x = value(r, 2)
    (weights(r, 2) * replica.all_reduce(op, x) ** 2).sum().backward()
    assert x.grad is not None
    return x.grad


def expected_of_reduce(op: str, count: int) -> torch.Tensor:
    """d/dx_r of SUM: the sum of what comes in; of MEAN: its mean."""
    total = sum(value(r, 2).detach() for r in range(count))
    seen = total if op == "SUM" else total / count
    incoming = sum(2 * weights(r, 2) * seen for r in range(count))
    return incoming if op == "SUM" else incoming / count


def gathered() -> torch.Tensor:
    """Replica r's loss is <v_r, all_gather(x)^3>."""
    replica = context()
    r = replica.replica_id_in_sync_group
    x = value(r, SIZES[r])
    together = replica.all_gather(x, 0)
    (weights(r, together.shape[0]) * together**3).sum().backward()
    assert x.grad is not None
    return x.grad


def expected_of_gather(replica_id: int, count: int) -> torch.Tensor:
    everything = torch.cat([value(r, SIZES[r]).detach() for r in range(count)])
    incoming = sum(weights(r, len(everything)) * 3 * everything**2 for r in range(count))
    start = sum(SIZES[:replica_id])
    return incoming[start : start + SIZES[replica_id]]


def gathered_along_one() -> torch.Tensor:
    replica = context()
    r = replica.replica_id_in_sync_group
    x = torch.full((2, r + 1), 1.0 + r, dtype=torch.float64, requires_grad=True)
    together = replica.all_gather(x, 1)
    (together * torch.arange(together.shape[1])).sum().backward()
    assert x.grad is not None
    return x.grad


DEVICES = {2: ["cpu:0", "cpu:1"], 3: ["cpu:0", "cpu:1", "cpu:2"]}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce_in_process(op: str, count: int) -> None:
    with td.MirroredStrategy(DEVICES[count]) as strategy:
        for grad in strategy.run(reduced, args=(op,)).values:
            torch.testing.assert_close(grad, expected_of_reduce(op, count))


@pytest.mark.parametrize("count", [2, 3])
def test_all_gather_in_process(count: int) -> None:
    with td.MirroredStrategy(DEVICES[count]) as strategy:
        for r, grad in enumerate(strategy.run(gathered).values):
            torch.testing.assert_close(grad, expected_of_gather(r, count))


def test_all_gather_along_another_axis(two: Any) -> None:
    first, second = two.run(gathered_along_one).values
    assert first.tolist() == [[0.0], [0.0]]
    assert second.tolist() == [[2.0, 4.0]] * 2


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce_on_ranks(op: str) -> None:
    with td.MirroredStrategy() as strategy:
        torch.testing.assert_close(strategy.run(reduced, args=(op,)), expected_of_reduce(op, 2))


@pytest.mark.distributed(workers=2)
def test_all_gather_on_ranks(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        torch.testing.assert_close(strategy.run(gathered), expected_of_gather(rank, 2))
        expected = [[0.0], [0.0]] if rank == 0 else [[2.0, 4.0]] * 2
        assert strategy.run(gathered_along_one).tolist() == expected


@pytest.mark.distributed(workers=2)
def test_two_replicas_on_each_of_two_ranks(rank: int) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        for op in ("SUM", "MEAN"):
            for grad in strategy.run(reduced, args=(op,)).values:
                torch.testing.assert_close(grad, expected_of_reduce(op, 4))


def test_a_value_without_gradient_stays_without(two: Any) -> None:
    def fn() -> bool:
        total: torch.Tensor = context().all_reduce("SUM", torch.ones(1))
        return total.requires_grad

    assert two.run(fn) is False
