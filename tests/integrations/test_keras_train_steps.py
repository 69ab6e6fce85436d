"""What a ``train_step`` assigns, the optimizers it uses and what its losses divide by: as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import ops
from keras_models import QUIET, central_ranks, weights_of

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

pytestmark = QUIET
CENTRAL = NamedStrategy("central_2", lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]))
CENTRAL_RANKS = NamedStrategy("central_2_workers", central_ranks, 2)
ALL = strategy_combinations("mirrored_2", "mirrored_3", CENTRAL, "mirrored_2_workers", CENTRAL_RANKS, timeout=120)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(23, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 23)
WORDS = RANDOM.integers(1, 9, (23, 5)) * (np.arange(5) < RANDOM.integers(2, 6, (23, 1)))
WEIGHTS = RANDOM.uniform(0.2, 2.0, (23, 5)).astype("float32")
OF_THE_PROGRAM: dict[str, Any] = {}
"""Keras objects that a step uses and that are no attributes of its model."""


def one_device_and(strategy: tfd.Strategy) -> Iterator[Any]:
    """Scopes to do the same in, each with the same random numbers."""
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(3)
        yield scope


def network() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(6)])


class Plain(keras.Model):
    """Learns to turn its input around."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tracker, self.built = network(), keras.metrics.Mean(name="tracked"), True
        self.prepare()

    def prepare(self) -> None:
        """What the kinds of below make besides."""

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.net(x)

    def loss_of(self, x: Any) -> Any:
        return ops.mean((self.net(x) - ops.flip(x, 1)) ** 2)

    def optimize(self, loss: Any) -> None:
        weights = self.net.trainable_weights
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)

    def after(self, x: Any) -> None:
        """What the kinds of below do after the optimizer."""

    def train_step(self, x: Any) -> dict[str, Any]:
        loss = self.loss_of(x)
        self.optimize(loss)
        self.after(x)
        self.tracker.update_state(loss.detach(), sample_weight=len(x))
        return {"tracked": self.tracker.result(), "twice": 2 * self.tracker.result()}

    def told(self) -> list[float]:
        return []


class Teacher(Plain):
    """Follows the student, and teaches it."""

    def prepare(self) -> None:
        self.teacher = network()

    def loss_of(self, x: Any) -> Any:
        return super().loss_of(x) + ops.mean((self.net(x) - ops.stop_gradient(self.teacher(x))) ** 2)

    def after(self, x: Any) -> None:
        for own, other in zip(self.teacher.weights, self.net.weights, strict=True):
            own.assign(0.7 * own + 0.3 * other)


class SetTeacher(Teacher):
    def after(self, x: Any) -> None:
        self.teacher.set_weights(self.net.get_weights())


class Clipped(Plain):
    def after(self, x: Any) -> None:
        for weight in self.net.trainable_weights:
            weight.assign(ops.clip(weight, -0.3, 0.3))


class ClippedFirst(Plain):
    """The gradient is that of the weight which was assigned to."""

    def loss_of(self, x: Any) -> Any:
        for weight in self.net.trainable_weights:
            weight.assign(ops.clip(weight, -0.3, 0.3))
        return super().loss_of(x)


class Slower(Plain):
    def after(self, x: Any) -> None:
        self.optimizer.learning_rate = self.optimizer.learning_rate * 0.9

    def told(self) -> list[float]:
        return [float(self.optimizer.learning_rate)]


class Loose(Plain):
    """A variable, a whole number, an optimizer and a metric that are the program's."""

    def prepare(self) -> None:
        OF_THE_PROGRAM["scale"] = keras.Variable(1.0, trainable=False)
        OF_THE_PROGRAM["count"] = keras.Variable(0, trainable=False, dtype="int64")
        OF_THE_PROGRAM["adam"] = keras.optimizers.Adam(0.05)
        OF_THE_PROGRAM["mean"] = keras.metrics.Mean()

    def loss_of(self, x: Any) -> Any:
        return super().loss_of(x) * OF_THE_PROGRAM["scale"]

    def optimize(self, loss: Any) -> None:
        weights = self.net.trainable_weights
        gradients = torch.autograd.grad(loss, [w.value for w in weights])
        with torch.no_grad():
            OF_THE_PROGRAM["adam"].apply(gradients, weights)

    def after(self, x: Any) -> None:
        OF_THE_PROGRAM["scale"].assign(OF_THE_PROGRAM["scale"] * 0.9)
        OF_THE_PROGRAM["count"].assign_add(1)
        OF_THE_PROGRAM["mean"].update_state(ops.mean(x, 1))

    def told(self) -> list[float]:
        scale, count, mean = (OF_THE_PROGRAM[name] for name in ("scale", "count", "mean"))
        return [float(scale), float(count), float(mean.result()), float(mean.count)]


class OfTorch(Plain):
    """Trained by an optimizer of torch."""

    def prepare(self) -> None:
        self.sgd = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def optimize(self, loss: Any) -> None:
        self.sgd.zero_grad()
        loss.backward()
        self.sgd.step()


class Unstable(Plain):
    """What a replica without examples computes, of zeros, is no number."""

    def after(self, x: Any) -> None:
        self.optimizer.learning_rate.assign(0.05 * ops.mean(ops.sum(x, 1) / ops.sum(x, 1)))


class StartsAgain(Plain):
    """The metric forgets what was before this step."""

    def after(self, x: Any) -> None:
        self.tracker.reset_state()


class Normalised(Plain):
    def prepare(self) -> None:
        layers = keras.layers
        hidden = layers.SpectralNormalization(layers.Dense(5))
        self.net = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(6)])


KINDS = (Plain, Teacher, SetTeacher, Clipped, ClippedFirst, Slower, Loose, OfTorch, Unstable, StartsAgain, Normalised)


def trained(scope: Any, kind: type[Plain], rows: int) -> tuple[dict[str, list[float]], np.ndarray]:
    """History, and all that the training left."""
    with scope:
        model = kind()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(X[:rows], batch_size=5, epochs=3, shuffle=False, verbose=0).history
    return history, np.array([*weights_of(model), *model.told()])


@ALL
def test_steps_of_ones_own_agree_with_one_device(strategy: tfd.Strategy) -> None:
    """Uneven shares, and a replica without an example at the end of each epoch."""
    rows = 20 + strategy.num_replicas_in_sync - 1
    for kind in KINDS:
        (history, weights), (theirs, their_weights) = (trained(s, kind, rows) for s in one_device_and(strategy))
        np.testing.assert_allclose(their_weights, weights, atol=2e-5, err_msg=kind.__name__)
        np.testing.assert_allclose(theirs["tracked"], history["tracked"], atol=2e-5, err_msg=kind.__name__)
        assert theirs["twice"] == pytest.approx(history["twice"], rel=0.1), kind.__name__  # of what it knows itself


def words(loss: Any) -> keras.Model:
    """Tags words; a 0 is none."""
    layers = keras.layers
    hidden = [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4, return_sequences=True)]
    model = keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=["accuracy"])
    return model


def classes(loss: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax", kernel_regularizer="l2")])
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return model


def pairs(loss: Any) -> keras.Model:
    """A sum beside a mean."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [keras.layers.Dense(3, "softmax")(inputs), keras.layers.Dense(1)(inputs)])
    model.compile(keras.optimizers.SGD(0.02), [loss, "mse"], loss_weights=[0.2, 1.0])
    return model


class Mean(keras.losses.Loss):
    """Is one number already, which Keras does not sum."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred))


@strategy_combinations("mirrored_2", CENTRAL, "mirrored_2_workers", CENTRAL_RANKS, timeout=120)
def test_losses_that_are_no_mean_over_the_examples(strategy: tfd.Strategy) -> None:
    """Sums, and means over what a mask leaves or over weights."""
    crossentropy = keras.losses.SparseCategoricalCrossentropy
    for name, made, x, y, weight in (
        ("sum", lambda: classes(crossentropy(reduction="sum")), X, Y, None),
        ("sum of weighted", lambda: classes(crossentropy(reduction="sum")), X, Y, WEIGHTS[:, 0]),
        ("sum and mean", lambda: pairs(crossentropy(reduction="sum")), X, [Y, X[:, :1]], None),
        ("over weights", lambda: classes(crossentropy(reduction="mean_with_sample_weight")), X, Y, WEIGHTS[:, 0]),
        ("no weights", lambda: classes(crossentropy(reduction="mean_with_sample_weight")), X, Y, None),
        ("one number", lambda: classes(Mean(reduction="sum")), X, Y, None),
        ("a class left out", lambda: classes(crossentropy(ignore_class=1)), X, Y, None),
        ("masked", lambda: words(crossentropy()), WORDS, WORDS % 3, None),
        ("masked sum", lambda: words(crossentropy(reduction="sum")), WORDS, WORDS % 3, None),
        ("masked, over weights", lambda: words(crossentropy(reduction="mean_with_sample_weight")), WORDS, WORDS % 3,
         WEIGHTS),
    ):  # fmt: skip
        results = []
        for scope in one_device_and(strategy):
            with scope:
                model = made()
            fitted = model.fit(x, y, sample_weight=weight, batch_size=5, epochs=2, shuffle=False, verbose=0).history
            measured = model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)
            batch = [part[:5] for part in y] if isinstance(y, list) else y[:5]
            single = model.train_on_batch(x[:5], batch, return_dict=True)
            results.append((*fitted["loss"], measured["loss"], single["loss"], *weights_of(model)))
        np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=2e-5, err_msg=name)


class Drawing(Plain):
    """Draws by Keras' own seed, its own and one of the program."""

    def prepare(self) -> None:
        self.seeds = keras.random.SeedGenerator(100)
        OF_THE_PROGRAM["seeds"] = keras.random.SeedGenerator(200)

    def call(self, x: Any) -> Any:
        size = (len(x), 1)
        return ops.concatenate(
            [keras.random.normal(size, seed=seed) for seed in (None, self.seeds, OF_THE_PROGRAM["seeds"])], 1
        )


@strategy_combinations("mirrored_2", CENTRAL, "mirrored_2_workers")
def test_predictions_that_draw_numbers_differ_between_replicas(strategy: tfd.Strategy) -> None:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Drawing()
    drawn = np.concatenate([model.predict(X[:12], batch_size=6, verbose=0) for _ in range(2)])
    assert np.unique(drawn).size == drawn.size == 2 * 12 * 3


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_torch_trains_after_keras(strategy: tfd.Strategy) -> None:
    """``fit`` lets the gradients be as they were before it."""
    found = []
    for scope in one_device_and(strategy):
        with scope:
            net = network()
            net.compile(keras.optimizers.SGD(0.1), "mse")
            net.fit(X, X[:, ::-1].copy(), batch_size=5, shuffle=False, verbose=0)
            model = OfTorch()
            model.net = net
            model.prepare()
            model.compile("sgd")
        model.fit(X, batch_size=5, epochs=2, shuffle=False, verbose=0)
        found.append(weights_of(net))
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)


class Measured(Plain):
    """Tells of each batch besides what the metric knows."""

    def test_step(self, x: Any) -> dict[str, Any]:
        loss = self.loss_of(x)
        self.tracker.update_state(loss, sample_weight=len(x))
        return {"tracked": self.tracker.result(), "last": loss}


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_a_number_of_the_last_batch_is_not_taken_for_a_metric(strategy: tfd.Strategy) -> None:
    found = []
    for scope in one_device_and(strategy):
        with scope:
            model = Measured()
            model.compile("sgd")
        found.append(model.evaluate(X, batch_size=10, verbose=0, return_dict=True))
    assert found[1] == pytest.approx(found[0], rel=0.2)  # the last batch is of 3: its mean is that of two shares
    assert abs(found[1]["last"] - found[1]["tracked"]) > 1e-3
    assert found[1]["tracked"] == pytest.approx(found[0]["tracked"], rel=1e-5)


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_a_model_that_fit_builds_has_its_parameters(strategy: tfd.Strategy) -> None:
    """Not those of the meta device that Keras computes shapes with."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(3, "softmax")])
        assert not list(model.parameters())
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(X, Y, batch_size=8, verbose=0)
    values = {id(variable.value) for variable in model.trainable_variables}
    assert {id(p) for p in model.parameters() if p.requires_grad} == values
    assert not any(p.is_meta for p in model.parameters())


class Loop:
    """A loop of the program's own: what its step assigns besides what the optimizer does."""

    def __init__(self) -> None:
        self.net, self.teacher = network(), network()
        self.optimizer, self.seeds = keras.optimizers.SGD(0.1), keras.random.SeedGenerator(3)
        self.scale = keras.Variable(1.0, trainable=False)
        self.count = keras.Variable(0, trainable=False, dtype="int64")

    def step(self, x: Any) -> None:
        factor = self.scale + keras.random.uniform((), seed=self.seeds)
        weights = self.net.trainable_variables
        loss = ops.sum((self.net(x) - ops.flip(x, 1)) ** 2) / 24 * factor
        gradients = torch.autograd.grad(loss, [w.value for w in weights])
        with torch.no_grad():
            self.optimizer.apply(gradients, weights)
        self.optimizer.learning_rate = self.optimizer.learning_rate * 0.9
        self.scale.assign(self.scale * 0.9)
        self.count.assign_add(1)
        for own, other in zip(self.teacher.weights, weights, strict=True):
            own.assign(0.7 * own + 0.3 * other)

    def told(self) -> np.ndarray:
        numbers = [float(self.optimizer.learning_rate), float(self.scale), int(self.count)]
        return np.array([*weights_of(self.net), *weights_of(self.teacher), *numbers, *self.seeds.state.numpy()])


@ALL
def test_a_loop_of_ones_own_assigns_once(strategy: tfd.Strategy) -> None:
    """And not once for each replica of the process."""
    found = []
    for scope in one_device_and(strategy):
        with scope:
            loop = Loop()
        loader = torch.utils.data.DataLoader(torch.tensor(X[:20]), batch_size=4)
        if not found:
            for batch in loader:
                loop.step(batch)
        else:
            strategy.set_gradient_policy([v.value for v in loop.net.trainable_variables], reduce_at="apply")
            for batch in strategy.experimental_distribute_dataset(loader):
                strategy.run(loop.step, args=(batch,))
        found.append(loop.told())
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)
