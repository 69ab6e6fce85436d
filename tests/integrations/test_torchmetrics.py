"""Metrics of torchmetrics that a step updates in ``strategy.run``: computed outside, they cover all replicas."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics as tm
from this_replica import replica
from until import wait_until_gone

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

Central = tfd.experimental.CentralStorageStrategy
CENTRAL = NamedStrategy("central_2", lambda: Central(["cpu:0", "cpu:1"]))
MULTI_WORKER = NamedStrategy("multi_worker_2", lambda: tfd.MultiWorkerMirroredStrategy(devices=["cpu:0"]), 2)
EVERY = strategy_combinations(
    "one_device", "mirrored_1", "mirrored_2", "mirrored_3", CENTRAL, "mirrored_2_workers",
    "mirrored_2_workers_2_replicas", MULTI_WORKER, timeout=90,
)  # fmt: skip
IN_ONE_PROCESS = strategy_combinations("mirrored_2", "mirrored_3", CENTRAL)
CLASSES = 3


def batch(step: int, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all replicas see in a step: predictions and classes."""
    generator = torch.Generator().manual_seed(step)
    size = 4 * replicas
    scores = torch.randn(size, CLASSES, generator=generator).softmax(-1)
    return scores, torch.randint(CLASSES, (size,), generator=generator)


def share(of: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of this replica; replicas need not have equally much."""
    count = tfd.get_strategy().num_replicas_in_sync
    first, last = 4 * replica(), 4 * replica() + 4
    if count > 1 and replica() < 2:  # the second has two of the first one's
        first, last = (0, 2) if replica() == 0 else (2, 8)
    here = torch.get_default_device()  # which is the replica's own in the tests on devices
    return of[0][first:last].to(here), of[1][first:last].to(here)


def several(**options: Any) -> Any:
    """Metrics of which one counts for two, one keeps all that it saw, and one a matrix."""
    kinds: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES, **options}
    return tm.MetricCollection({
        "precision": tm.Precision(average="macro", **kinds), "recall": tm.Recall(average="macro", **kinds),
        "area": tm.AUROC(**kinds), "matrix": tm.ConfusionMatrix(**kinds),
    })  # fmt: skip


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, msg=lambda said, name=name: f"{name}: {said}")


@EVERY
def test_metrics_cover_all_replicas(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        metrics, mean = several(), tm.MeanMetric()
    expected, expected_mean = several(sync_on_compute=False), tm.MeanMetric(sync_on_compute=False)
    outside = tm.SumMetric()  # which the step finds

    def step(of: tuple[torch.Tensor, torch.Tensor]) -> None:
        scores, classes = share(of)
        metrics.update(scores, classes)
        mean.update(scores[:, 0])
        outside.update(float(replica() + 1))

    n = strategy.num_replicas_in_sync
    for epoch in range(2):
        for i in range(3):
            of = batch(10 * epoch + i, n)
            expected.update(*of)
            expected_mean.update(of[0][:, 0])
            strategy.run(step, args=(of,))
        for _ in range(2):  # the second time out of the cache
            same(metrics.compute(), expected.compute())
            torch.testing.assert_close(mean.compute().cpu(), expected_mean.compute())
        assert float(outside.compute()) == 3 * n * (n + 1) / 2
        for metric in (metrics, mean, outside, expected, expected_mean):
            metric.reset()


@EVERY
def test_the_same_in_a_replica(strategy: tfd.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        total, joint = tm.SumMetric(), tm.SumMetric(dist_sync_on_step=True)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return total(float(replica() + 1)), joint(float(replica() + 1)), total.compute()

    for i in range(1, 3):
        own, batches, all_of_them = strategy.run(step)
        found = [float(x) for x in strategy.experimental_local_results(own)]
        assert found == [float(k + 1) for k in map(strategy.worker.replica_id, range(len(found)))]
        for value in strategy.experimental_local_results(batches):
            assert float(value) == n * (n + 1) / 2
        for value in strategy.experimental_local_results(all_of_them):
            assert float(value) == i * n * (n + 1) / 2


@IN_ONE_PROCESS
def test_what_is_counted_outside_counts_once(strategy: tfd.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    by_replicas = n * (n + 1) / 2
    total = tm.SumMetric()
    total.update(3.0)

    def step() -> None:
        total.update(float(replica() + 1))

    assert total.compute() == 3
    strategy.run(step)
    assert total.compute() == 3 + by_replicas
    total.update(1.0)
    strategy.run(step)
    assert total.compute() == 4 + 2 * by_replicas
    assert total(2.0) == 2  # of the batch alone
    assert total.compute() == 6 + 2 * by_replicas
    total.reset()
    total.update(5.0)
    assert total.compute() == 5
    strategy.run(step)
    assert total.compute() == 5 + by_replicas


@IN_ONE_PROCESS
def test_after_a_run_that_failed_all_have_what_they_counted(strategy: tfd.Strategy) -> None:
    total, last = tm.SumMetric(), strategy.num_replicas_in_sync - 1

    def step(fails: bool) -> None:
        total.update(float(replica() + 1))
        if fails and replica() == last:
            raise ArithmeticError("nothing is wrong")

    strategy.run(step, args=(False,))
    with pytest.raises(ArithmeticError, match="nothing is wrong"):
        strategy.run(step, args=(True,))
    n = strategy.num_replicas_in_sync
    assert total.compute() == n * (n + 1)


@IN_ONE_PROCESS
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: m.clone(), lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "clone", "pickle"],
)
def test_a_copy_counts_for_itself(strategy: tfd.Strategy, copied: Callable[[Any], Any]) -> None:
    total = tm.SumMetric()

    def step(metric: Any) -> None:
        metric.update(1.0)

    strategy.run(step, args=(total,))
    other = copied(total)
    other.reset()
    strategy.run(step, args=(other,))
    strategy.run(step, args=(other,))
    assert total.compute() == strategy.num_replicas_in_sync
    assert other.compute() == 2 * strategy.num_replicas_in_sync


@IN_ONE_PROCESS
def test_a_metric_that_was_told_how_to_join_is_left_alone(strategy: tfd.Strategy) -> None:
    asked = []

    def twice(value: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        asked.append(group)
        return [value, value]

    total = tm.SumMetric(dist_sync_fn=twice, distributed_available_fn=lambda: True)
    strategy.run(lambda: total.update(float(replica() + 1)))
    assert total.compute() == 2
    assert asked == [None]
    total.reset()
    assert set(strategy.experimental_local_results(strategy.run(lambda: float(total.sum_value)))) == {0.0}


@IN_ONE_PROCESS
def test_metrics_that_hold_others(strategy: tfd.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    bounds, tracker = tm.MinMaxMetric(tm.MeanMetric()), tm.MetricTracker(tm.MeanMetric(), maximize=True)
    both = tm.SumMetric() + tm.MaxMetric()
    mean = (n - 1) / 2
    for value in (1.0, 3.0, 2.0):
        tracker.increment()

        def step(value: float = value) -> None:
            for metric in (bounds, tracker, both):
                metric.update(value + replica())

        strategy.run(step)
        bounds.compute()
    assert {name: float(x) for name, x in bounds.compute().items()} == {
        "raw": 2.0 + mean, "max": 2.0 + mean, "min": 1.0 + mean,
    }  # fmt: skip
    assert tracker.compute_all().tolist() == [1.0 + mean, 3.0 + mean, 2.0 + mean]
    assert float(both.compute()) == 6 * n + 3 * n * mean + 3 + (n - 1)


def test_a_closed_strategy_says_so() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        total = tm.SumMetric()
        strategy.run(lambda: total.update(1.0))
        assert total.compute() == 2
        strategy.run(lambda: total.update(1.0))
    with pytest.raises(RuntimeError, match="was closed"):
        total.compute()


def test_a_strategy_that_is_gone_says_so() -> None:
    total, computed = tm.SumMetric(), tm.SumMetric()

    def train() -> weakref.ref[Any]:
        strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
        for metric in (total, computed):
            strategy.run(lambda metric=metric: metric.update(float(replica() + 1)))
        assert computed.compute() == 3
        return weakref.ref(strategy)

    wait_until_gone(train())
    with pytest.raises(RuntimeError, match=r"strategy whose replicas updated this SumMetric is gone.*or reset"):
        total.compute()
    assert computed.compute() == 3, "it knows what it gave"
    total.reset()
    total.update(5.0)
    assert total.compute() == 5
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(lambda: total.update(float(replica() + 1)))
        assert total.compute() == 8


@EVERY
def test_sync_shows_what_all_replicas_counted(strategy: tfd.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        total = tm.SumMetric()

    def step() -> tuple[float, float, float]:
        total.update(float(replica() + 1))
        with total.sync_context():
            first = float(total.sum_value)
        if n == 1:  # torchmetrics syncs nothing there
            return first, first, first
        total.sync()
        second = float(total.sum_value)
        total.unsync()
        return first, second, float(total.sum_value)

    found = strategy.experimental_local_results(strategy.run(step))
    every = n * (n + 1) / 2
    assert list(found) == [(every, every, strategy.worker.replica_id(k) + 1.0) for k in range(len(found))]
    with total.sync_context():
        assert float(total.sum_value) == every
    assert float(total.sum_value) == strategy.worker.replica_id(0) + 1
    strategy.run(lambda: total.update(float(replica() + 1)))
    assert float(total.compute()) == 2 * every


@strategy_combinations("mirrored_2", "mirrored_3", CENTRAL, "mirrored_2_workers_2_replicas", timeout=90)
@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64], ids=str)
def test_what_was_kept_is_joined_whatever_its_type_and_size(strategy: tfd.Strategy, dtype: torch.dtype) -> None:
    class Kept(tm.Metric):  # type: ignore[misc, name-defined]
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", default=[], dist_reduce_fx="cat")
            self.add_state("last", default=torch.zeros((), dtype=dtype), dist_reduce_fx=None)

        def update(self, rows: torch.Tensor) -> None:
            self.rows.append(rows)
            self.last = rows[-1, -1]

        def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.cat([*self.rows] if isinstance(self.rows, list) else [self.rows]), self.last

    n = strategy.num_replicas_in_sync
    rows = [torch.arange(2 * k).reshape(k, 2).to(dtype) for k in range(n)]
    with strategy.scope():
        metric = Kept()

    def step() -> None:
        if len(rows[replica()]):  # the first of several has seen nothing
            metric.update(rows[replica()])

    strategy.run(step)
    kept, last = metric.compute()
    assert kept.dtype == dtype
    assert torch.equal(kept.cpu(), torch.cat(rows))
    ends = [r[-1, -1] if len(r) else torch.zeros((), dtype=dtype) for r in rows]
    assert torch.equal(last.cpu(), torch.stack(ends))


WRAPPERS: dict[str, Callable[[], tm.Metric]] = {
    "least and most": lambda: tm.MinMaxMetric(tm.classification.MulticlassAccuracy(CLASSES)),
    "by class": lambda: tm.ClasswiseWrapper(tm.classification.MulticlassAccuracy(CLASSES, average=None)),
    "sum of two": lambda: tm.classification.MulticlassAccuracy(CLASSES) + tm.classification.MulticlassF1Score(CLASSES),
}


@IN_ONE_PROCESS
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_keeps_what_was_counted_before_the_first_run(strategy: tfd.Strategy, kind: str) -> None:
    alone, count = WRAPPERS[kind](), strategy.num_replicas_in_sync
    with strategy.scope():
        metric = WRAPPERS[kind]()
    for one in (alone, metric):
        one.update(*batch(0, count))
    alone.update(*batch(1, count))
    strategy.run(lambda: metric.update(*share(batch(1, count))))
    torch.testing.assert_close(metric.compute(), alone.compute())
