"""Metrics of torcheval's kind that a step updates in ``strategy.run``: read outside, they cover all replicas."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from until import wait_until_gone

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

Central = tfd.experimental.CentralStorageStrategy
CENTRAL = NamedStrategy("central_2", lambda: Central(["cpu:0", "cpu:1"]))
IN_ONE_PROCESS = strategy_combinations("one_device", "mirrored_2", "mirrored_3", CENTRAL)
WORKERS = strategy_combinations("mirrored_2_workers", "mirrored_2_workers_2_replicas", timeout=60)


class OwnMean:
    """A metric as torcheval's are, which need not be installed for these tests."""

    def __init__(self) -> None:
        self._state_name_to_default = {"total": torch.tensor(0.0), "count": torch.tensor(0), "seen": []}
        self.reset()

    def reset(self) -> OwnMean:
        for name, default in self._state_name_to_default.items():
            setattr(self, name, copy.deepcopy(default))
        return self

    def update(self, values: torch.Tensor) -> OwnMean:
        self.total, self.count = self.total + values.sum(), self.count + values.numel()
        self.seen.append(values)
        return self

    def compute(self) -> torch.Tensor:
        return self.total / self.count

    def merge_state(self, others: list[OwnMean]) -> OwnMean:
        for other in others:
            self.total, self.count = self.total + other.total, self.count + other.count
            self.seen += other.seen
        return self

    def state_dict(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in self._state_name_to_default}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))

    def _prepare_for_merge_state(self) -> None:
        self.seen = [torch.cat(self.seen)] if self.seen else []


def _of_torcheval() -> Any:
    return pytest.importorskip("torcheval.metrics").Mean()


@pytest.fixture
def two() -> Iterator[tfd.Strategy]:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


KINDS = pytest.mark.parametrize("make", [OwnMean, _of_torcheval], ids=["own", "torcheval"])


def values() -> torch.Tensor:
    """What this replica sees: one number more than the one before, each as large as the replica's."""
    context = tfd.get_replica_context()
    assert context is not None
    replica = context.replica_id_in_sync_group
    return torch.full((replica + 1,), float(replica + 1))


def expected(replicas: int) -> float:
    return sum((k + 1) ** 2 for k in range(replicas)) / sum(k + 1 for k in range(replicas))


@KINDS
@IN_ONE_PROCESS
def test_what_is_read_outside_covers_all_replicas(strategy: tfd.Strategy, make: Any) -> None:
    n = strategy.num_replicas_in_sync
    metric = make()

    def step() -> torch.Tensor:
        metric.update(values())
        return metric.compute()

    for _ in range(2):
        for _ in range(2):
            own = strategy.experimental_local_results(strategy.run(step))
            assert [float(mean) for mean in own] == [k + 1.0 for k in range(n)], "in a replica it is that replica's"
        for _ in range(2):
            assert float(metric.compute()) == pytest.approx(expected(n))
        metric.reset()


@KINDS
@IN_ONE_PROCESS
def test_what_is_counted_loaded_or_copied_outside_counts_once(strategy: tfd.Strategy, make: Any) -> None:
    n = strategy.num_replicas_in_sync
    examples = n * (n + 1) // 2
    metric = make()
    metric.update(torch.tensor([0.0]))
    strategy.run(lambda: metric.update(values()) and None)
    metric.update(torch.tensor([0.0]))
    strategy.run(lambda: None)
    mean = expected(n) * examples / (examples + 2)
    assert float(metric.compute()) == pytest.approx(mean)
    saved, other = metric.state_dict(), make()
    other.load_state_dict(saved)
    assert float(other.compute()) == pytest.approx(mean)
    metric.load_state_dict(saved)
    assert float(metric.compute()) == pytest.approx(mean)
    strategy.run(lambda: metric.update(values()) and None)
    assert float(metric.compute()) == pytest.approx(2 * expected(n) * examples / (2 * examples + 2))


@KINDS
@WORKERS
def test_what_workers_send_each_other_covers_their_replicas(strategy: tfd.Strategy, make: Any) -> None:
    """What ``torcheval.metrics.toolkit.sync_and_compute`` does, which sends the attributes that the metric shows."""
    metric, n = make(), strategy.num_replicas_in_sync
    for _ in range(2):
        strategy.run(lambda: metric.update(values()) and None)
        metric._prepare_for_merge_state()
        names = ("total", "count") if make is OwnMean else ("weighted_sum", "weights")
        sent = strategy.worker.group.gather_objects([float(getattr(metric, name)) for name in names], "metrics")
        assert sum(total for total, _ in sent) / sum(count for _, count in sent) == pytest.approx(expected(n))


@KINDS
def test_a_strategy_that_is_gone_says_so(make: Any) -> None:
    metric = make()

    def train() -> weakref.ref[Any]:
        strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.run(lambda: metric.update(values()) and None)
        return weakref.ref(strategy)

    wait_until_gone(train())
    with pytest.raises(RuntimeError, match=r"strategy whose replicas updated this \w+ is gone.*Call compute\(\) while"):
        metric.compute()
    metric.reset()
    metric.update(torch.tensor([3.0]))
    assert float(metric.compute()) == 3.0
    metric.reset()

    def train_and_compute() -> weakref.ref[Any]:
        strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.run(lambda: metric.update(values()) and metric.reset() and None)
        return weakref.ref(strategy)

    wait_until_gone(train_and_compute())
    metric.update(torch.tensor([3.0]))
    assert float(metric.compute()) == 3.0, "what replicas counted was reset by them"


@KINDS
def test_reading_is_no_run(two: Any, make: Any) -> None:
    metric, model = make(), torch.nn.Dropout(0.5)
    two.experimental_adopt(model)

    def step() -> torch.Tensor:
        metric.update(values())
        return model(torch.ones(16))

    def trained(reads: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            found += two.experimental_local_results(two.run(step))
            if reads:
                metric.compute()
                metric.state_dict()
        return found

    torch.testing.assert_close(trained(reads=True), trained(reads=False), rtol=0, atol=0)


@KINDS
def test_what_is_loaded_in_the_step_and_what_is_merged(two: Any, make: Any) -> None:
    metric, other = make(), make()
    other.update(torch.tensor([5.0, 7.0]))
    saved = other.state_dict()
    two.run(lambda: metric.load_state_dict(saved))
    metric.update(torch.tensor([9.0]))
    assert float(metric.compute()) == 7.0, "counts once, not once for each replica"
    two.run(lambda: other.update(values()) and None)
    metric.merge_state([other])
    assert float(metric.compute()) == pytest.approx((5 + 7 + 9 + 5 + 7 + 1 + 2 + 2) / 8)
