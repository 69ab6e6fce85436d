"""Keras metrics that a step updates in ``strategy.run``: read outside, they cover all replicas of all workers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import QUIET, central_ranks, dense, digits
from this_replica import replica

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

pytestmark = QUIET
Central = tfd.experimental.CentralStorageStrategy
CENTRAL = NamedStrategy("central_2", lambda: Central(["cpu:0", "cpu:1"]))
CENTRAL_WORKERS = NamedStrategy("central_2_workers", central_ranks, 2)
MULTI_WORKER = NamedStrategy("multi_worker_2", lambda: tfd.MultiWorkerMirroredStrategy(devices=["cpu:0"]), 2)
EVERY = strategy_combinations(
    "one_device", "mirrored_1", "mirrored_2", "mirrored_3", CENTRAL, "mirrored_2_workers",
    "mirrored_2_workers_2_replicas", CENTRAL_WORKERS, MULTI_WORKER, timeout=90,
)  # fmt: skip


@pytest.fixture
def folder(strategy: tfd.Strategy, request: pytest.FixtureRequest) -> Path:
    """One for all workers of the strategy."""
    found: Path = request.getfixturevalue("tmp_path" if strategy.worker.group.size == 1 else "shared_tmp_path")
    return found


@EVERY
def test_a_metric_counts_all_replicas(strategy: tfd.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        area = keras.metrics.AUC(num_thresholds=5)
    outside = keras.metrics.Sum()

    def step() -> tuple[Any, Any]:
        k = replica()
        mean.update_state(torch.full((4,), float(k)))
        outside.update_state(torch.tensor(float(k + 1)))
        accuracy.update_state(torch.tensor([0, 1, 1]), torch.eye(2)[[0, 1, k % 2]])
        area.update_state(torch.tensor([0, 1]), torch.tensor([0.1, 0.1 + 0.8 * (k % 2)]))
        return float(mean.result()), float(mean.count)

    right, expected = sum(2 + k % 2 for k in range(n)) / (3 * n), keras.metrics.AUC(num_thresholds=5)
    for k in range(n):
        expected.update_state(np.array([0, 1]), np.array([0.1, 0.1 + 0.8 * (k % 2)]))
    for _ in range(2):
        for _ in range(3):
            inside = strategy.run(step)
        # In the step a metric is the replica's own.
        own = [strategy.worker.replica_id(k) for k in range(strategy.worker.num_local_replicas)]
        pairs = list(zip(*(strategy.experimental_local_results(part) for part in inside), strict=True))
        assert pairs == [(float(k), 12.0) for k in own]
        assert (float(mean.result()), float(mean.count)) == ((n - 1) / 2, 12.0 * n)
        assert float(outside.result()) == 3 * n * (n + 1) / 2
        assert float(accuracy.result()) == pytest.approx(right)
        assert float(area.result()) == pytest.approx(float(expected.result()))
        for metric in (mean, outside, accuracy, area):
            metric.reset_state()
            assert all(float(keras.ops.sum(keras.ops.abs(v))) == 0 for v in metric.variables)


@EVERY
def test_metrics_of_a_compiled_model_in_a_loop_of_ones_own(strategy: tfd.Strategy) -> None:
    """``compute_metrics`` makes them at its first call, inside ``run``."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", loss="mse", metrics=["mae"])

    def step() -> None:
        x = torch.ones(replica() + 1, 3)
        with torch.no_grad():
            model.compute_metrics(x, torch.full((len(x), 2), float(replica())), model(x) * 0)

    for _ in range(2):
        strategy.run(step)
    examples = [k + 1 for k in range(strategy.num_replicas_in_sync)]
    expected = sum(k * count for k, count in enumerate(examples)) / sum(examples)
    assert float(model.get_metrics_result()["mae"]) == pytest.approx(expected)


@strategy_combinations("mirrored_2", "mirrored_2_workers", "mirrored_2_workers_2_replicas", timeout=90)
def test_a_loop_of_ones_own_and_fit_share_metrics(strategy: tfd.Strategy) -> None:
    """What a metric counted in ``run`` is read on the chief alone after ``fit`` and outside updates, without a word."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", metrics=["mae"])
        own = keras.metrics.Mean()
    strategy.run(lambda: own.update_state(torch.tensor(float(replica()))))
    before = float(own.result())
    x = np.ones((12, 3), "float32")

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert float(own.result()) == before

    history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[Reads()]).history
    assert history["mae"][1] < history["mae"][0]
    own.reset_state()
    own.update_state(torch.tensor([2.0, 4.0]))  # in cross-replica context all workers do the same
    if strategy.is_chief:
        assert (float(own.result()), float(own.count)) == (3.0, 2.0)


class Hits(keras.metrics.Metric):
    """As the example of ``keras.metrics.Metric`` is: the result is the state itself."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.hits = self.add_weight(name="hits", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        found = keras.ops.logical_and(y_true > 0.5, y_pred > 0.5)
        self.hits.assign(self.hits + keras.ops.sum(keras.ops.cast(found, self.dtype)))

    def result(self) -> Any:
        return self.hits


@strategy_combinations("mirrored_2", "mirrored_2_workers", timeout=60)
def test_a_metric_whose_result_is_its_state(strategy: tfd.Strategy) -> None:
    """Callbacks of the chief see what all workers read, while the next step is under way."""
    x = np.random.default_rng(0).normal(size=(1000, 4)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
            model.compile("sgd", "binary_crossentropy", metrics=[Hits()])
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        found.append(history["hits"] + [model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)["hits"]])
    assert found[1] == found[0]
    assert found[0][0] > 0


class Several(keras.metrics.SparseCategoricalCrossentropy):
    """A metric with several results, as Keras allows."""

    def result(self) -> Any:
        value = super().result()
        return {"entropy": value, "perplexity": keras.ops.exp(value)}


@strategy_combinations("mirrored_2", "mirrored_2_workers", timeout=90)
def test_a_metric_that_has_several_results(strategy: tfd.Strategy) -> None:
    (x, y), histories = digits()[0], []
    x, y = x[:90], y[:90]
    for scope in (strategy.scope(), contextlib.nullcontext()):
        keras.utils.set_random_seed(1)
        with scope:
            model = dense(metrics=[Several(name="of_outputs"), "accuracy"])
        history = model.fit(x, y, batch_size=40, epochs=2, validation_split=0.2, shuffle=False, verbose=0).history
        on_batch = model.train_on_batch(x[:7], y[:7], return_dict=True)
        histories.append({**history, **on_batch, "evaluated": model.evaluate(x, y, verbose=0, return_dict=True)})
    ours, plain = histories
    assert ours.keys() == plain.keys()
    for name, numbers in plain.items():
        assert ours[name] == pytest.approx(numbers, rel=1e-4)


@strategy_combinations("mirrored_3", "mirrored_2_workers")
def test_counts_of_whole_numbers_are_divided_without_a_rest(strategy: tfd.Strategy) -> None:
    class Counter(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.seen = self.add_variable((), "zeros", dtype="int64", name="seen")

        def update_state(self) -> None:
            self.seen.assign_add(1)

        def result(self) -> Any:
            return self.seen

    with strategy.scope():
        counter = Counter()
    counter.seen.assign(7)
    strategy.run(counter.update_state)
    assert int(counter.result()) == 7 + strategy.num_replicas_in_sync


@strategy_combinations("one_device", "mirrored_2", "mirrored_2_workers_2_replicas")
def test_writing_into_a_variable_that_is_read_as_a_sum(strategy: tfd.Strategy) -> None:
    """The same of ``tfd.Variable``: in-place operations outside of ``run`` change the sum."""
    read, add = tfd.VariableSynchronization.ON_READ, tfd.VariableAggregation.SUM
    with strategy.scope():
        variable = tfd.Variable(0.0, synchronization=read, aggregation=add)
    with torch.no_grad():
        variable.copy_(torch.tensor(6.0))
        assert float(variable) == 6.0
        variable += 2.0
        torch.add(variable, 1.0, out=variable)
    assert float(variable) == 9.0
    strategy.run(lambda: variable.assign_add(torch.tensor(1.0)))
    assert float(variable) == 9.0 + strategy.num_replicas_in_sync


def trained(strategy: Any, model: Any, optimizer: Any, steps: int) -> None:
    """Steps with the sum of squares over one batch, divided among the replicas."""
    x = torch.linspace(-1, 1, 48).view(16, 3)

    def step() -> None:
        share = x.chunk(strategy.num_replicas_in_sync)[replica()]
        loss = (model(share) - share.sum(1, keepdim=True)).square().sum() / 16
        model.zero_grad()
        loss.backward()
        weights = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([w.value.grad for w in weights], weights)

    for _ in range(steps):
        strategy.run(step)


@EVERY
@pytest.mark.parametrize("restored", ["built", "not built"])
def test_a_checkpoint_of_model_optimizer_and_metric(strategy: tfd.Strategy, folder: Path, restored: str) -> None:
    def made() -> tuple[Any, Any, Any]:
        with strategy.scope():
            layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
            return keras.Sequential([keras.Input((3,)), *layers]), keras.optimizers.Adam(0.05), keras.metrics.Mean()

    keras.utils.set_random_seed(0)
    model, optimizer, metric = made()
    trained(strategy, model, optimizer, 3)
    strategy.run(lambda: metric.update_state(torch.tensor(float(replica()))))
    checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer, metrics=[metric])
    path = checkpoint.save(folder / "ckpt")
    saved = [keras.ops.convert_to_numpy(v).copy() for v in (*model.variables, *optimizer.variables)]
    counted = (float(metric.result()), float(metric.count))
    trained(strategy, model, optimizer, 2)
    ahead = [keras.ops.convert_to_numpy(v) for v in model.variables]

    again, other, counter = made()
    if restored == "built":
        other.build(again.trainable_variables)
    fresh = tfd.train.Checkpoint(model=again, optimizer=other, metrics=[counter])
    fresh.restore(path).assert_consumed()
    for variable, value in zip((*again.variables, *other.variables), saved, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    assert int(other.iterations) == 3
    assert (float(counter.result()), float(counter.count)) == counted
    trained(strategy, again, other, 2)
    for variable, value in zip(again.variables, ahead, strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), value, atol=1e-6)


def test_what_a_checkpoint_cannot_restore_is_named(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    path = tfd.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
    with pytest.raises(tfd.errors.InvalidArgumentError, match="model has no variables yet: build the model"):
        tfd.train.Checkpoint(model=keras.Sequential([keras.layers.Dense(1)])).restore(path)
    with pytest.raises(tfd.errors.InvalidArgumentError, match=r"call optimizer.build\(model.trainable_variables\)"):
        tfd.train.Checkpoint(optimizer=keras.optimizers.Adam()).restore(path)
    wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(tfd.errors.InvalidArgumentError, match=r"model/0/kernel has shape \[4, 1\], saved was \[3, 1\]"):
        tfd.train.Checkpoint(model=wide).restore(path)


@EVERY
def test_what_a_metric_of_no_scope_had_counted_before_is_counted_once(strategy: tfd.Strategy) -> None:
    n, metric = strategy.num_replicas_in_sync, keras.metrics.Mean()
    metric.update_state(10.0)

    def step() -> None:
        metric.update_state(torch.tensor(7.0))

    for runs in (1, 2):
        strategy.run(step)
        assert [float(v) for v in metric.variables] == pytest.approx([10 + 7 * n * runs, 1 + n * runs])
    metric.reset_state()
    strategy.run(step)
    assert [float(v) for v in metric.variables] == pytest.approx([7 * n, n])
