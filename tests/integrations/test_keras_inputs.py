"""What ``fit`` takes, and the methods and model code beside it, on two replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import on_devices
import pytest
import torch
from keras_models import QUIET, SHUFFLES, dense, digits, weights_of

import tfstyle_dist as tfd
from tfstyle_dist.integrations.keras import strategy_of
from tfstyle_dist.testing.strategies import strategy_combinations

pytestmark = QUIET
TRAIN, TEST = digits()
X, Y = TRAIN[0][:230], TRAIN[1][:230]
TWO = strategy_combinations("mirrored_2", "mirrored_2_workers")


class Batches(keras.utils.PyDataset):
    """Batches of 50 and one of 30."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.epochs = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[index * 50 : index * 50 + 50], Y[index * 50 : index * 50 + 50]

    def on_epoch_end(self) -> None:
        self.epochs += 1


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        for start in range(0, 230, 50):
            yield X[start : start + 50], Y[start : start + 50]


def loader() -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=50)


INPUTS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 50, "shuffle": False},
    "tensors": lambda: {"x": torch.from_numpy(X), "y": torch.from_numpy(Y), "batch_size": 50, "shuffle": False},
    "weights": lambda: {"x": X, "y": Y, "batch_size": 50, "sample_weight": np.linspace(0, 2, 230)},
    "batch shuffle": lambda: {"x": X, "y": Y, "batch_size": 50, "shuffle": "batch"},
    "split": lambda: {"x": X, "y": Y, "batch_size": 50, "validation_split": 0.2},
    "loader": lambda: {"x": loader(), "shuffle": False, "validation_data": loader()},
    "pydataset": lambda: {"x": Batches(workers=1)},
    "pydataset, two threads": lambda: {"x": Batches(workers=2), "shuffle": False},
    "generator": lambda: {"x": endless(), "steps_per_epoch": 5, "shuffle": False, "validation_data": (X, Y)},
    "few steps": lambda: {"x": X, "y": Y, "batch_size": 50, "steps_per_epoch": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", INPUTS)
@TWO
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_input_as_on_one_device(strategy: tfd.Strategy, kind: str) -> None:
    if on_devices.NAMES and "threads" in kind:
        pytest.skip("Keras' threads begin an epoch where reading stopped; on devices one batch more is read ahead")

    def train(scope: Any) -> tuple[dict[str, list[float]], np.ndarray]:
        keras.utils.set_random_seed(2)
        with scope:
            model = dense()
        given: dict[str, Any] = {"shuffle": SHUFFLES, **INPUTS[kind]()}
        return model.fit(**given, epochs=2, verbose=0).history, weights_of(model)

    history, weights = train(contextlib.nullcontext())
    theirs, their_weights = train(strategy.scope())
    assert theirs.keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(theirs[name], values, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(their_weights, weights, atol=1e-4)


@TWO
def test_workers_that_are_not_seeded_alike(strategy: tfd.Strategy) -> None:
    """Worker 0's order counts, for arrays and for a shuffled PyDataset."""
    keras.utils.set_random_seed(strategy.worker.group.rank)
    with strategy.scope():
        model = dense()
    model.fit(X, Y, batch_size=50, verbose=0)
    model.fit(Batches(workers=1), verbose=0)
    weights = strategy.gather(strategy.run(lambda: torch.from_numpy(weights_of(model))[None]), axis=0)
    assert bool((weights == weights[0]).all())


@TWO
def test_methods_for_one_batch(strategy: tfd.Strategy) -> None:
    def run(scope: Any) -> list[Any]:
        keras.utils.set_random_seed(2)
        with scope:
            model = dense()
        trained = model.train_on_batch(X[:31], Y[:31], return_dict=True)
        tested = model.test_on_batch(X[:31], Y[:31])
        return [trained["loss"], trained["accuracy"], *tested, *np.ravel(model.predict_on_batch(X[:31]))]

    np.testing.assert_allclose(run(strategy.scope()), run(contextlib.nullcontext()), atol=1e-5)


class TwoOptimizers(keras.Model):
    """A training step of the user's own: two losses, two optimizers, the second after the first's update."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(10)
        self.other = keras.optimizers.SGD(0.05)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        losses = []
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
            self.zero_grad()
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss.backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in layer.trainable_variables], layer.trainable_variables)
            losses.append(loss)
        return {"loss": losses[0], "gain": losses[0] - losses[1]}


@TWO
def test_a_training_step_of_the_users_own(strategy: tfd.Strategy) -> None:
    def train(scope: Any) -> tuple[list[Any], np.ndarray]:
        keras.utils.set_random_seed(2)
        with scope:
            model = TwoOptimizers()
            model(keras.ops.zeros((1, 64)))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
            model.other.build(model.second.trainable_variables)
            model.optimizer.build(model.first.trainable_variables)
        seen: list[Any] = []
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
        watch.on_every_worker = True
        model.fit(X[:200], Y[:200], batch_size=25, shuffle=False, verbose=0, callbacks=[watch])
        return [[s["loss"], s["gain"]] for s in seen], weights_of(model)

    logs, weights = train(contextlib.nullcontext())
    their_logs, their_weights = train(strategy.scope())
    np.testing.assert_allclose(their_logs, logs, atol=1e-5)
    np.testing.assert_allclose(their_weights, weights, atol=1e-5)


@TWO
def test_a_loop_of_the_users_own_sums_gradients(strategy: tfd.Strategy) -> None:
    """As in TensorFlow: divide the loss by the global batch."""
    with strategy.scope():
        model = dense(loss=None, metrics=None, optimizer=keras.optimizers.SGD(1.0))
    strategy.set_gradient_policy([v.value for v in model.trainable_variables], reduce_at="apply")
    before = weights_of(model)

    def step() -> None:
        model.zero_grad()
        sum(v.value.sum() for v in model.trainable_variables).backward()
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)

    strategy.run(step)
    np.testing.assert_allclose(weights_of(model), before - 2, atol=1e-5)


@pytest.mark.parametrize("scale", ["MEAN", "SUM"])
def test_gradients_that_backward_made_one_already(scale: str) -> None:
    """The sum of equal means is the sum of the gradients; sums cannot be added again."""
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = dense(loss=None, metrics=None, optimizer=keras.optimizers.SGD(1.0))
        before = weights_of(model)
        strategy.set_gradient_policy([v.value for v in model.trainable_variables], scale=scale, reduce_at="backward")

        def step() -> None:
            sum(v.value.sum() for v in model.trainable_variables).backward()
            with torch.no_grad():
                model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)

        if scale == "MEAN":
            strategy.run(step)
            np.testing.assert_allclose(weights_of(model), before - 2, atol=1e-5)
        else:
            with pytest.raises(RuntimeError, match="averaged over the replicas already"):
                strategy.run(step)


def test_models_of_no_strategy_are_as_they_were() -> None:
    model = dense()
    assert strategy_of(model) is None
    assert model.fit(X, Y, verbose=0).history["loss"]
    assert type(model.train_function).__name__ == "function"
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            other = dense()
        assert strategy_of(other) is strategy
        with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as second, second.scope():
            with pytest.raises(RuntimeError, match="Mixing different"):
                other.compile(optimizer="sgd", loss="mse")
            with pytest.raises(RuntimeError, match="Mixing different"):
                other.fit(X, Y, verbose=0)
        with pytest.raises(ValueError, match="A dataset function is for ParameterServerStrategy"):
            other.fit(lambda context: [], steps_per_epoch=1)


def test_saved_in_a_scope_and_loaded_in_another(tmp_path: Any) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = dense()
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.weights[0].value) is torch.nn.Parameter
    np.testing.assert_array_equal(weights_of(plain), weights_of(model))
    with tfd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as other:
        with other.scope():
            again = keras.models.load_model(tmp_path / "model.keras")
        assert strategy_of(again) is other
        kept = [int(m.optimizer.iterations) for m in (model, again)]
        assert kept == [8, 8]
        plain.fit(X, Y, batch_size=60, shuffle=False, verbose=0)
        again.fit(X, Y, batch_size=60, shuffle=False, verbose=0)
        np.testing.assert_allclose(weights_of(again), weights_of(plain), atol=1e-5)


class Halves(keras.Model):
    """Has no weights before its first batch."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer=keras.initializers.Constant(0.5))

    def call(self, x: Any) -> Any:
        return x * self.scale


@strategy_combinations("one_device", "mirrored_2", "mirrored_2_workers")
def test_a_model_belongs_to_the_scope_in_which_it_was_made(strategy: tfd.Strategy) -> None:
    """Even if it has no weights yet, and is compiled, built and trained outside."""

    def train(scope: Any, kind: Any) -> keras.Model:
        keras.utils.set_random_seed(2)
        with scope:
            model: keras.Model = kind()
        model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(X, X, batch_size=50, shuffle=False, verbose=0)
        return model

    for kind in (Halves, lambda: keras.Sequential([keras.layers.Dense(64)])):
        together = train(strategy.scope(), kind)
        assert strategy_of(together) is strategy
        alone = train(contextlib.nullcontext(), kind)
        np.testing.assert_allclose(weights_of(together), weights_of(alone), atol=1e-5)
