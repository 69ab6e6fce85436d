"""``Strategy.reduce`` along an axis: truth values, small integers, halves; and what a ``PerReplica`` is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from this_replica import replica

import tfstyle_dist as td

STRATEGIES: dict[str, Callable[[], td.Strategy]] = {
    "mirrored": lambda: td.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: td.OneDeviceStrategy("cpu:0"),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    with STRATEGIES[request.param]() as strategy:
        yield strategy


def shares_of(strategy: td.Strategy, whole: torch.Tensor) -> Any:
    """Three rows for the first replica, the others for the second one."""
    if strategy.num_replicas_in_sync == 1:
        return strategy.run(lambda: whole)
    cuts = [whole[:3], whole[3:]]
    return strategy.run(lambda: cuts[td.get_replica_context().replica_id_in_sync_group])  # type: ignore[union-attr]


def test_truth_values_are_counted(strategy: td.Strategy) -> None:
    right = torch.tensor([True, True, False, True, True, True, True, False])
    given = shares_of(strategy, right)
    assert int(strategy.reduce("SUM", given, axis=0)) == 6
    assert float(strategy.reduce("MEAN", given, axis=0)) == 0.75
    pairs = shares_of(strategy, torch.stack([right, ~right], 1))
    assert strategy.reduce("SUM", pairs, axis=0).tolist() == [6, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_a_mean_of_integers_has_room(strategy: td.Strategy, dtype: torch.dtype) -> None:
    given = shares_of(strategy, torch.full((1000,), 100, dtype=dtype))
    assert float(strategy.reduce("MEAN", given, axis=0)) == 100.0
    assert strategy.reduce("MEAN", given, axis=0).dtype is torch.float32
    assert strategy.reduce("SUM", given, axis=0).dtype is dtype, "sums keep the type, as in TensorFlow"


def test_a_mean_of_halves_has_a_count_beyond_them(strategy: td.Strategy) -> None:
    given = shares_of(strategy, torch.full((80000,), 0.0625, dtype=torch.float16))
    mean = strategy.reduce("MEAN", given, axis=0)
    assert (float(mean), mean.dtype) == (0.0625, torch.float16)


@pytest.mark.parametrize("axis", [(0, 1), [0, 1], (-1, 0), (), (1,), [-2], np.int64(0)])
def test_several_axes(strategy: td.Strategy, axis: Any) -> None:
    parts = [torch.arange(6.0).reshape(2, 3) + 10 * r for r in range(strategy.num_replicas_in_sync)]
    given = strategy.run(lambda: parts[replica()])
    along = tuple(axis) if isinstance(axis, tuple | list) else (int(axis),)
    total = sum(part.sum(along) if along else part for part in parts)
    assert isinstance(total, torch.Tensor)
    assert strategy.reduce("SUM", given, axis=axis).equal(total)
    count = sum(float(np.prod([part.shape[a] for a in along])) for part in parts)
    torch.testing.assert_close(strategy.reduce("MEAN", given, axis=axis), total / count)


def test_uneven_shares_along_several_axes(strategy: td.Strategy) -> None:
    whole = torch.arange(24, dtype=torch.int8).reshape(8, 3)
    given = shares_of(strategy, whole)
    assert float(strategy.reduce("MEAN", given, axis=(0, 1))) == 11.5
    assert int(strategy.reduce("SUM", given, axis=(1, 0))) == 276 % 256, "sums keep the type"


@pytest.mark.parametrize(
    ("axis", "error", "words"),
    [
        (1.5, TypeError, r"axis must be a whole number, or a tuple or list of such, got 1.5; write e.g. axis=0"),
        ("0", TypeError, "got '0'"),
        ((0, None), TypeError, r"got \(0, None\)"),
        ((0, 2), ValueError, r"axis 2 is out of range .* of rank 2: `axis` = \(0, 2\) not in \[-2, 2\)"),
        ((0, -2), ValueError, r"names a dimension of a value of shape \(\d, 3\) twice; name each once"),
    ],
)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_what_names_no_axis(strategy: td.Strategy, op: str, axis: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        strategy.reduce(op, shares_of(strategy, torch.ones(6, 3)), axis=axis)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2])
def test_types_without_a_sum(strategy: td.Strategy, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"has no sum in torch: cast it before it is reduced"):
        strategy.reduce("SUM", shares_of(strategy, torch.ones(6).to(dtype)), axis=0)


@pytest.mark.distributed(workers=2, timeout=60)
def test_truth_values_are_counted_between_ranks(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        own = strategy.run(lambda: torch.tensor([[True, True, True], [True, False, True]][rank]))
        assert int(strategy.reduce("SUM", own, axis=0)) == 5
        assert float(strategy.reduce("MEAN", own, axis=0)) == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    "use",
    [
        *(float, int, round, lambda v: v + 1, lambda v: 1.0 - v, lambda v: v / 2, lambda v: v < 1, lambda v: v.item()),
        *(lambda v: torch.ones(1) * v, lambda v: f"{v:.3f}", lambda v: sum([v]), lambda v: -v),
    ],
)
def test_a_per_replica_value_is_no_number(use: Callable[[Any], Any]) -> None:
    with STRATEGIES["mirrored"]() as strategy:
        loss = strategy.run(lambda: torch.rand(()))
        with pytest.raises(TypeError, match=r"PerReplica is no number.*strategy.reduce\('MEAN', value, axis=None\)"):
            use(loss)
        assert "PerReplica" in f"{loss}"


def test_arrays_of_numpy_are_reduced_as_in_tensorflow() -> None:
    with STRATEGIES["mirrored"]() as strategy:
        own = strategy.run(lambda: np.array([1.0, 2.0]) * (replica() + 1))
        assert strategy.reduce("SUM", own, axis=None).tolist() == [3.0, 6.0]
        assert float(strategy.reduce("MEAN", strategy.run(lambda: np.float32(replica())), axis=None)) == 0.5
        total = strategy.run(lambda: td.get_replica_context().all_reduce("SUM", np.ones(2)))  # type: ignore[union-attr]
        assert strategy.experimental_local_results(total)[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: td.MirroredStrategy(2), "devices must be a sequence of devices, got 2"),
        (lambda: td.ParameterServerStrategy("x"), r"must have a method cluster_spec\(\), got 'x'"),
        (lambda: td.experimental.CommunicationOptions(bytes_per_pack="1MB"), "a whole number of bytes, got '1MB'"),
        (lambda: td.get_strategy().experimental_distribute_dataset([torch.ones(2)], "x"), "must be InputOptions"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize("task", ["worker", "ps"])
def test_a_task_that_is_to_serve_cannot_be_the_coordinator(task: str) -> None:
    spec = td.cluster_resolver.ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})
    resolver = td.cluster_resolver.SimpleClusterResolver(spec, task_type=task, task_id=0)
    with pytest.raises(ValueError, match=rf"a task of the job '{task}', but ParameterServerStrategy belongs"):
        td.ParameterServerStrategy(resolver)
