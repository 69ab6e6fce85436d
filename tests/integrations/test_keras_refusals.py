"""What several replicas cannot do with a Keras model is refused, and not done wrongly."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import QUIET

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

pytestmark = QUIET
CENTRAL = NamedStrategy("central_2", lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]))
SEVERAL = strategy_combinations("mirrored_2", CENTRAL, "mirrored_2_workers", timeout=60)
X = np.random.default_rng(0).normal(size=(8, 4, 3)).astype("float32")
Y = X[:, 0, :1]


class OfOnesOwn(keras.Sequential):
    """Its step is that of Keras, and what is done after it."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def made(strategy: tfd.Strategy, kind: Any = keras.Sequential) -> keras.Model:
    with strategy.scope():
        model = kind([keras.Input((4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@SEVERAL
def test_training_inside_of_run(strategy: tfd.Strategy) -> None:
    x, y = torch.tensor(X[:4]), torch.tensor(Y[:4])
    for kind in (keras.Sequential, OfOnesOwn):
        model = made(strategy, kind)
        before = model.get_weights()
        calls: dict[str, Any] = {
            "fit": lambda model=model: model.fit(x, y, verbose=0),
            "train_on_batch": lambda model=model: model.train_on_batch(x, y),
            "train_step": lambda model=model: model.train_step((x, y)),
        }
        for name, call in calls.items():
            with pytest.raises(
                RuntimeError, match=rf"{kind.__name__}\.{name} was called inside of strategy.run, by each"
            ):
                strategy.run(call)
        for weight, value in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, value)
        told = strategy.run(lambda model=model: torch.as_tensor(model.test_on_batch(x, y)))
        assert float(strategy.reduce("MEAN", told, axis=None)) == pytest.approx(model.test_on_batch(x, y), rel=1e-5)
        model.fit(X, Y, batch_size=4, verbose=0)


@strategy_combinations("one_device", "mirrored_1")
def test_training_inside_of_run_of_one_replica(strategy: tfd.Strategy) -> None:
    model = made(strategy)
    before = model.get_weights()[0]
    strategy.run(lambda: model.train_on_batch(torch.tensor(X), torch.tensor(Y)))
    assert bool((model.get_weights()[0] != before).any())


class Late(keras.Model):
    """Makes its layers as it is built."""

    def build(self, shape: Any) -> None:
        self.inner = keras.layers.GRU(2, stateful=True)
        self.inner.build((2, *shape[1:]))

    def call(self, x: Any) -> Any:
        return self.inner(x)[:, :1]


def recurrent() -> list[keras.Model]:
    layers = keras.layers
    first: list[Any] = [layers.LSTM(2, stateful=True), layers.Bidirectional(layers.GRU(2, stateful=True))]
    return [*(keras.Sequential([keras.Input(batch_shape=(2, 4, 3)), r, layers.Dense(1)]) for r in first), Late()]


@SEVERAL
def test_layers_that_keep_states(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        models = recurrent()
        for model in models:
            model.compile("sgd", "mse")
    for model in models[:2]:
        for call in (
            lambda m: m.fit(X, Y, batch_size=4, verbose=0),
            lambda m: m.evaluate(X, Y, batch_size=4, verbose=0),
            lambda m: m.predict(X, batch_size=4, verbose=0),
            lambda m: m.train_on_batch(X[:4], Y[:4]),
            lambda m: m.test_on_batch(X[:4], Y[:4]),
            lambda m: m.predict_on_batch(X[:4]),
        ):
            with pytest.raises(NotImplementedError, match=r"layer '\w+' \(\w+\) was made with stateful=True"):
                call(model)
    if strategy.worker.group.size == 1:  # several workers want a model that is built
        with pytest.raises(NotImplementedError, match=r"\(GRU\) was made with stateful=True"):
            models[2].predict(X, batch_size=4, verbose=0)  # which builds it


class Largest(keras.metrics.Metric):
    def __init__(self, changes: bool) -> None:
        super().__init__(name="largest")
        self.changes = changes
        self.most = self.add_variable((), "zeros", aggregation="none", name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if self.changes:
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(keras.ops.abs(y_pred))))

    def result(self) -> Any:
        return self.most + 3.0


@SEVERAL
def test_a_metric_that_says_nothing_of_several_replicas(strategy: tfd.Strategy) -> None:
    for changes in (True, False):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[Largest(changes)])
        if changes:
            for method in (model.fit, model.evaluate):
                with pytest.raises(ValueError, match=r"'largest/most', which has aggregation='none'.*add_weight"):
                    method(X, Y, batch_size=4, verbose=0)
        else:
            assert model.fit(X, Y, batch_size=4, verbose=0).history["largest"] == [3.0]
