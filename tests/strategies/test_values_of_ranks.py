"""What ranks reduce and gather besides dense tensors of the common types: numbers, arrays, rare types, sparse ones."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import CollectiveMismatchError, InvalidArgumentError

GATHERED = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.bool, torch.complex64]


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_numbers_and_arrays_are_each_ranks_own(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        loss = strategy.run(lambda: float(rank + 1))
        assert float(strategy.reduce("MEAN", loss, axis=None)) == 1.5
        assert float(strategy.reduce("SUM", loss, axis=None)) == 3.0
        assert float(strategy.reduce("MEAN", rank + 1, axis=None)) == 1.5
        array = np.array([1.0, 2.0]) * (rank + 1)
        assert strategy.reduce("MEAN", array, axis=None).tolist() == [1.5, 3.0]
        assert strategy.reduce("SUM", {"seen": [np.float64(rank)]}, axis=None)["seen"][0] == 1.0
        assert float(strategy.extended.reduce_to("SUM", loss, "cpu:0")) == 3.0
        mean, part = strategy.extended.batch_reduce_to("MEAN", [(loss, "cpu:0"), (array, "cpu:0")])
        assert (float(mean), part.tolist()) == (1.5, [1.5, 3.0])
        assert strategy.gather(array, axis=0).tolist() == [1.0, 2.0, 2.0, 4.0]
        with pytest.raises(InvalidArgumentError, match=r"a scalar needs value.reshape\(1\) first"):
            strategy.gather(loss, axis=0)


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_numbers_that_the_replicas_of_a_rank_share(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        shared = strategy.run(lambda: rank + 1)
        assert float(strategy.reduce("MEAN", shared, axis=None)) == 1.5
        assert float(strategy.reduce("MEAN", torch.tensor(rank + 1.0), axis=None)) == 1.5
        with pytest.raises(ValueError, match="cannot be reduced with SUM: it is not a per-replica value"):
            strategy.reduce("SUM", shared, axis=None)
        assert strategy.gather(torch.tensor([rank]), axis=0).tolist() == [0, 1], "one for each worker"


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_rare_types_are_gathered(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        for dtype in GATHERED:
            whole = strategy.gather(torch.ones(1 + rank, 2).to(dtype), axis=0)
            assert (whole.dtype, whole.shape) == (dtype, (3, 2))
            assert whole.to(torch.complex64).real.eq(1).all()


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_int16_between_ranks(rank: int, shared_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared_memory)

    def of(number: int) -> torch.Tensor:
        return torch.full((2,), number, dtype=torch.int16)

    with td.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            total = td.Variable(of(1 + rank), trainable=False, aggregation=td.VariableAggregation.SUM)
        assert total.value().tolist() == [1, 1], "the first worker's value"
        strategy.run(lambda: total.assign_add(of(5 + rank)))
        assert total.value().tolist() == [12, 12]
        for method in (td.AggregationMethod.DEFAULT, td.AggregationMethod.ADD_N, td.AggregationMethod.TREE):
            strategy.cross_device_ops.aggregation_method = method
            summed = strategy.reduce("SUM", of(30000 * rank + 5), axis=None)
            assert (summed.dtype, summed.tolist()) == (torch.int16, [30010, 30010])
        assert strategy.reduce("MEAN", of(rank), axis=None).tolist() == [0.5, 0.5]


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_sparse_tensors_are_gathered(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        mine = torch.eye(2 + rank, 3)[rank:] * (1 + rank)
        for axis, value in ((0, mine), (1, mine.t())):
            whole = strategy.gather(value.to_sparse(), axis=axis)
            parts = [torch.eye(2, 3), torch.eye(3, 3)[1:] * 2]
            expected = torch.cat([part if axis == 0 else part.t() for part in parts], dim=axis)
            assert whole.is_sparse
            assert whole.to_dense().equal(expected)


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_ranks_that_gather_different_things_are_told(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        with pytest.raises(InvalidArgumentError, match=r"entry 1 is of torch.float32 .*, entry 0 of torch.int32"):
            strategy.gather(torch.ones(2, dtype=torch.float32 if rank else torch.int32), axis=0)
        with pytest.raises(InvalidArgumentError, match="make them all dense or all sparse COO first"):
            strategy.gather(torch.eye(2) if rank else torch.eye(2).to_sparse(), axis=0)
        with pytest.raises(CollectiveMismatchError, match="along axis 1"):
            strategy.gather(torch.ones(2, 2), axis=rank)
        assert strategy.gather(torch.ones(1), axis=0).tolist() == [1, 1], "all may go on"


def test_replicas_that_gather_different_types_are_told(two: Any) -> None:
    def typed() -> torch.Tensor:
        first = td.get_replica_context().replica_id_in_sync_group == 0  # type: ignore[union-attr]
        return torch.ones(2, dtype=torch.int32 if first else torch.float32)

    with pytest.raises(InvalidArgumentError, match=r"entry 1 is of torch.float32 .* cast them to one dtype"):
        two.gather(two.run(typed), axis=0)
    with pytest.raises(InvalidArgumentError, match=r"entry 1 is of torch.float32 .* cast them to one dtype"):
        two.run(lambda: td.get_replica_context().all_gather(typed(), axis=0))  # type: ignore[union-attr]


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_what_does_not_fit_on_one_rank_leaves_all_in_step(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:

        def value() -> torch.Tensor:
            number = td.get_replica_context().replica_id_in_sync_group
            return torch.ones(1, dtype=torch.float64 if number == 3 else torch.float32)

        with pytest.raises(InvalidArgumentError, match=r"entry 3 is of torch.float64"):
            strategy.gather(strategy.run(value), axis=0)
        assert strategy.gather(strategy.run(lambda: torch.ones(1)), axis=0).tolist() == [1.0] * 4
        with pytest.raises(ValueError, match=r"does not fit into a tensor, .* Give a smaller whole number"):
            strategy.reduce("MEAN", 2**70, axis=None)


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_one_rank_may_copy_a_variable(rank: int) -> None:
    """As programs do that keep the best weights on one of them."""
    with td.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable, model = td.Variable(1.0), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = copy.deepcopy((variable, model)) if rank == 0 else None

        def step() -> None:
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert kept is None or kept[0].item() == 1.0


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_what_an_assignment_gives_a_rank_is_its_own_copy(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            v = td.Variable(1.0)
        written = strategy.run(lambda: v.assign_add(torch.tensor(10.0 * (rank + 1))))
        assert float(strategy.reduce("MEAN", written, axis=None)) == 16.0
        assert float(strategy.reduce("SUM", written, axis=None)) == 32.0
