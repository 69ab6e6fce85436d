"""The plugin in this session itself, as the other tests of the package use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tfstyle_dist as td
from tfstyle_dist.testing.strategies import STRATEGIES, NamedStrategy, strategy_combinations


@pytest.mark.distributed(workers=2, deadline=20)
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_reduce(
    process_group: dist.ProcessGroup, rank: int, world_size: int, shared_tmp_path: Path, dtype: torch.dtype
) -> None:
    assert dist.get_backend() == "gloo"
    assert process_group.size() == world_size == 2
    values = torch.arange(3).to(dtype) + rank
    dist.all_reduce(values)
    assert values.tolist() == [1, 3, 5]
    (shared_tmp_path / str(rank)).touch(exist_ok=False)
    dist.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.distributed(workers=2)
def test_group_of_a_test_is_gone_after_it() -> None:
    assert not dist.is_initialized()


@pytest.mark.gpu
@pytest.mark.distributed(workers=2, backend="nccl")
def test_nccl_group(process_group: dist.ProcessGroup) -> None:
    values = torch.ones(1, device="cuda")
    dist.all_reduce(values, group=process_group)
    assert values.item() == 2


REPLICAS = {
    "default": 1,
    "one_device": 1,
    "mirrored_1": 1,
    "mirrored_2": 2,
    "mirrored_3": 3,
    "mirrored_2_workers": 2,
    "mirrored_2_workers_2_replicas": 4,
}


@strategy_combinations()
def test_every_strategy_sums(strategy: td.Strategy, request: pytest.FixtureRequest) -> None:
    total = strategy.reduce("SUM", strategy.run(lambda: torch.tensor(1.0)), axis=None)
    assert int(total) == strategy.num_replicas_in_sync == REPLICAS[request.node.callspec.id]


OWN = NamedStrategy("own", lambda: td.MirroredStrategy(["cpu:0", "cpu:1"], run_replicas="serial"))


@strategy_combinations("one_device", OWN, deadline=10)
def test_chosen_strategies(strategy: td.Strategy, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    assert strategy.num_replicas_in_sync == {"one_device": 1, "own": 2}[name]


@pytest.mark.distributed(workers=2, replicas=2)
def test_strategy_of_the_marker(strategy: td.Strategy, world_size: int) -> None:
    assert isinstance(strategy, td.MirroredStrategy)
    assert (world_size, strategy.num_replicas_in_sync) == (2, 4)


def test_strategy_without_ranks(strategy: td.Strategy) -> None:
    assert strategy.num_replicas_in_sync == 1


def test_unknown_strategy() -> None:
    with pytest.raises(ValueError, match=r"no strategy named 'mirrored_9'.*mirrored_2_workers"):
        strategy_combinations("mirrored_9")
    assert set(STRATEGIES) >= {"one_device", "mirrored_2"}
