"""Keras in loops and with a ``train_step`` of one's own: what Keras' guides and TensorFlow's tutorials do."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import QUIET, weights_of
from this_replica import replica

import tfstyle_dist as tfd
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.testing.strategies import strategy_combinations

pytestmark = QUIET
TWO = strategy_combinations("mirrored_2", "mirrored_2_workers")
X = np.random.default_rng(0).random((64, 6), dtype=np.float32)
Y = X.sum(1, keepdims=True)


class Guide(keras.Model):
    """As Keras' guide writes it: the result of compiled metrics is a dict in the dict."""

    def train_step(self, data: Any) -> dict[str, Any]:
        features, target = data
        self.zero_grad()
        guess = self(features, training=True)
        loss = self.compute_loss(y=target, y_pred=guess)
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(target, guess)
        return {metric.name: metric.result() for metric in self.metrics}


class Tracking(keras.Model):
    """As the guide of the variational autoencoder: a log has another name than the metric whose result it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="total_loss")
        self.built = True

    def call(self, features: Any) -> Any:
        return self.layer(features)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        features = data[0] if isinstance(data, tuple | list) else data
        self.tracker.update_state(features.mean())
        return {"loss": self.tracker.result(), "total_loss": self.tracker.result(), "own": features.mean() * 0 + 2}


def fitted(scope: Any) -> tuple[dict[str, Any], np.ndarray]:
    keras.utils.set_random_seed(1)
    with scope:
        inputs = keras.Input((6,))
        model = Guide(inputs, keras.layers.Dense(1)(inputs))
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history, weights_of(model)


@TWO
def test_a_train_step_that_returns_dicts_in_a_dict(strategy: tfd.Strategy) -> None:
    (history, weights), (their_history, their_weights) = fitted(contextlib.nullcontext()), fitted(strategy.scope())
    assert set(history) == set(their_history) == {"loss", "mae"}
    for name, numbers in history.items():
        np.testing.assert_allclose(their_history[name], numbers, rtol=1e-5)
    np.testing.assert_allclose(their_weights, weights, atol=1e-6)


@TWO
def test_a_log_is_the_result_of_a_metric_of_another_name(strategy: tfd.Strategy) -> None:
    values = np.repeat(np.array([0.0, 0.0, 0.0, 1.0], "float32"), 8)[:, None]  # the means of four batches
    with strategy.scope():
        model = Tracking()
        model.compile(optimizer="sgd")
    history = model.fit(values, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    assert history == {"loss": [0.25], "total_loss": [0.25], "own": [2.0]}


def test_a_model_may_be_built_by_its_first_call_in_run() -> None:
    def trained(strategy: Any) -> np.ndarray:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            n = strategy.num_replicas_in_sync
            here = torch.empty(0).device
            x, y = x.chunk(n)[replica()].to(here), y.chunk(n)[replica()].to(here)
            loss = (model(x) - y).pow(2).sum() / 64
            model.zero_grad()
            loss.backward()
            weights = model.trainable_variables
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in weights], weights)

        for _ in range(3):
            strategy.run(step, args=(torch.from_numpy(X), torch.from_numpy(Y)))
        if strategy.num_replicas_in_sync > 1:
            kernels = strategy.run(lambda: model.layers[0].kernel.value.detach().clone()).values
            assert torch.equal(*kernels)
        return weights_of(model)

    with tfd.OneDeviceStrategy("cpu:0") as one, tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as two:
        np.testing.assert_allclose(trained(two), trained(one), atol=1e-6)


def test_a_metric_that_a_step_updates_counts_all_replicas_of_the_process() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            metric = keras.metrics.Mean()
        for _ in range(50):
            strategy.run(lambda: metric.update_state(torch.full((4,), float(replica()))))
        assert (float(metric.result()), float(metric.count)) == (0.5, 400.0)


def test_a_replica_without_examples_updates_no_metric() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            metric = keras.metrics.Mean()
        for (x,) in strategy.experimental_distribute_dataset([(torch.tensor([1.0, 3.0]),), (torch.tensor([5.0]),)]):
            strategy.run(lambda share: metric.update_state(share.mean()), args=(x,))
        assert (float(metric.result()), float(metric.count)) == (3.0, 3.0)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_the_policy_may_be_set_for_any_number_of_replicas(devices: list[str]) -> None:
    with tfd.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        strategy.set_gradient_policy([v.value for v in model.trainable_variables], reduce_at="apply")
        with pytest.raises(ValueError, match="reduce_at must be one of"):
            strategy.set_gradient_policy(reduce_at="sometime")


def test_an_assignment_that_one_replica_makes_names_the_line() -> None:
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    variable = keras.Variable(1.0, trainable=False, name="rate")

    def step() -> None:
        context = tfd.get_replica_context()
        if context is not None and context.replica_id_in_sync_group == 1:
            variable.assign(2.0)

    with pytest.raises(CollectiveMismatchError, match=r"'rate' at .*test_keras_loops\.py:\d+"):
        strategy.run(step)
    assert float(variable) == 1.0


class Penalized(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2))
        return x


class ReadAgain(keras.Model):
    """Reads what its layers added once more when the gradients are there, as the example of a VQ-VAE does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        features, target = data
        self.zero_grad()
        loss = keras.ops.mean((self(features, training=True) - target) ** 2) + sum(self.losses)
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss, "added": sum(self.losses)}


@TWO
def test_what_layers_add_to_the_loss_may_be_read_after_backward(strategy: tfd.Strategy) -> None:
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(3)
        with scope:
            inputs = keras.Input((6,))
            model = ReadAgain(inputs, keras.layers.Dense(1)(Penalized()(inputs)))
            model.compile(keras.optimizers.SGD(0.05))
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found.append([*history["loss"], *history["added"], *weights_of(model)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


class Counting(keras.Model):
    """Keeps what it counts in lists, dicts and sets, which Keras replaces by ones of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.steps, self.stats, self.seen, self.both = [0], {"rate": 1.0}, {0}, [self.layer, {"scale": 1.0}]
        self.order = collections.OrderedDict(first=0)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        features, target = data
        self.steps[0] += 1
        self.stats["rate"] *= 0.5
        self.both[1]["scale"] *= 0.9
        self.seen.add(len(self.seen))
        self.order["first"] += 1
        self.zero_grad()
        loss = keras.ops.mean((self(features) - target) ** 2)
        scale = (self.stats["rate"] + self.both[1]["scale"]) / (self.steps[0] + len(self.seen) + self.order["first"])
        (loss * scale).backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


@TWO
def test_what_a_model_keeps_in_its_lists_is_each_replicas_own(strategy: tfd.Strategy) -> None:
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(3)
        with scope:
            model = Counting()
            model.compile(keras.optimizers.SGD(0.5))
        for _ in range(3):
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
            model.stats["rate"] = 1.0  # between steps, for all replicas
            model.steps.append(7)
        counted = [*model.steps, model.stats["rate"], len(model.seen), model.order["first"], model.both[1]["scale"]]
        found.append([*counted, *weights_of(model)])
        assert model.layers == [model.layer]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
