"""A Keras model in a strategy's scope trains, evaluates and predicts as on one device."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from keras_models import QUIET, SHUFFLES, central_ranks, dense, digits, weights_of

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

pytestmark = QUIET
CENTRAL = NamedStrategy("central_2", lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]))
CENTRAL_RANKS = NamedStrategy("central_2_workers", central_ranks, 2)
MULTI_WORKER = NamedStrategy("multi_worker_2", lambda: tfd.MultiWorkerMirroredStrategy(devices=["cpu:0"]), 2)
TRAIN, TEST = digits()


def results(scope: Any, model_of: Any = dense, **options: Any) -> dict[str, Any]:
    """History, evaluation, predictions and weights of one training."""
    keras.utils.set_random_seed(3)
    options = {"shuffle": SHUFFLES, **options}
    with scope:
        model = model_of()
    fitted = model.fit(*TRAIN, batch_size=100, epochs=2, validation_data=TEST, verbose=0, **options)
    return {
        "history": fitted.history,
        "evaluation": model.evaluate(*TEST, batch_size=50, verbose=0, return_dict=True),
        "predictions": model.predict(TEST[0], batch_size=64, verbose=0),
        "weights": weights_of(model),
        "model": model,
    }


@strategy_combinations(
    "one_device", "mirrored_2", CENTRAL, "mirrored_2_workers", "mirrored_2_workers_2_replicas", MULTI_WORKER,
    CENTRAL_RANKS, timeout=120,
)  # fmt: skip
def test_digits_as_on_one_device(strategy: tfd.Strategy) -> None:
    alone = results(contextlib.nullcontext())
    together = results(strategy.scope())
    assert together["history"].keys() == alone["history"].keys() == {"accuracy", "loss", "val_accuracy", "val_loss"}
    for name, values in alone["history"].items():
        np.testing.assert_allclose(together["history"][name], values, atol=1e-4, err_msg=name)
    assert together["evaluation"] == pytest.approx(alone["evaluation"], abs=1e-4)
    assert together["predictions"].shape == (357, 10)
    np.testing.assert_allclose(together["predictions"], alone["predictions"], atol=1e-4)
    np.testing.assert_allclose(together["weights"], alone["weights"], atol=1e-4)
    assert int(together["model"].optimizer.iterations) == 30


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_a_model_without_input_shape_and_other_optimizers(strategy: tfd.Strategy) -> None:
    """Built by fit, with activity losses, a weighted loss, gradient clipping and moving averages of the weights."""

    def model_of() -> keras.Model:
        layers = keras.layers
        hidden = layers.Dense(16, activation="tanh", activity_regularizer=keras.regularizers.L2(1e-2))
        model = keras.Sequential([hidden, layers.Dense(10)])
        model.compile(
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0, use_ema=True),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
        return model

    weights = {label: 1.0 + label for label in range(10)}
    alone = results(contextlib.nullcontext(), model_of, class_weight=weights)
    together = results(strategy.scope(), model_of, class_weight=weights)
    for name, values in alone["history"].items():
        np.testing.assert_allclose(together["history"][name], values, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(together["weights"], alone["weights"], atol=1e-4)


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_a_model_that_was_made_on_the_cpu_trains_on_the_devices(strategy: tfd.Strategy) -> None:
    """``KERAS_TORCH_DEVICE=cpu``, or built before the scope: its parameters are moved, and are the same objects."""

    def model_of() -> keras.Model:
        with keras.device("cpu"):
            made.append(dense())
        kept.append(made[-1].trainable_variables[0].value)
        return made[-1]

    made: list[keras.Model] = []
    kept: list[Any] = []
    with keras.device("cpu"):
        alone = results(contextlib.nullcontext(), model_of)
    together = results(strategy.scope(), model_of)
    np.testing.assert_allclose(together["history"]["loss"], alone["history"]["loss"], atol=1e-4)
    np.testing.assert_allclose(together["weights"], alone["weights"], atol=1e-4)
    assert made[-1].trainable_variables[0].value is kept[-1]
    assert kept[-1].device.type == strategy.worker.torch_device(0).type


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_metrics_are_exact_over_uneven_shares(strategy: tfd.Strategy) -> None:
    """357 examples in batches of 71: two shares of 36 and 35, and a last batch of 2."""
    with strategy.scope():
        model = dense(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)])
    probabilities = model.predict(TEST[0], batch_size=71, verbose=0)
    found = model.evaluate(*TEST, batch_size=71, verbose=0, return_dict=True)
    own = probabilities[np.arange(357), TEST[1]]
    penalty = 1e-3 * float((model.get_weights()[0] ** 2).sum())
    assert found["loss"] == pytest.approx(-np.log(own).mean() + penalty, rel=1e-5)
    assert found["accuracy"] * 357 == pytest.approx((probabilities.argmax(1) == TEST[1]).sum(), abs=1e-3)
    best = np.argsort(probabilities, 1)[:, -3:]
    top = (best == TEST[1][:, None]).any(1).sum()
    assert found["sparse_top_k_categorical_accuracy"] * 357 == pytest.approx(top, abs=1e-3)


@strategy_combinations("mirrored_3", "mirrored_2_workers_2_replicas")
def test_a_replica_without_examples_changes_nothing(strategy: tfd.Strategy) -> None:
    """Batches of 5 for 3 or 4 replicas; the last one is of 2."""
    x, y = TRAIN[0][:17], TRAIN[1][:17]

    def train(scope: Any) -> tuple[list[float], np.ndarray]:
        keras.utils.set_random_seed(5)
        with scope:
            model = dense()
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=SHUFFLES, verbose=0).history
        return history["loss"], weights_of(model)

    losses, weights = train(contextlib.nullcontext())
    their_losses, their_weights = train(strategy.scope())
    np.testing.assert_allclose(their_losses, losses, atol=1e-5)
    np.testing.assert_allclose(their_weights, weights, atol=1e-5)


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_batch_norm_and_dropout(strategy: tfd.Strategy) -> None:
    """Moving statistics are the mean over the replicas, and each replica drops other units."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense(keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.5, seed=2))
    before = model.get_weights()
    x, y = TRAIN[0][:60], TRAIN[1][:60]
    model.fit(x, y, batch_size=60, epochs=1, shuffle=False, verbose=0)
    hidden = np.maximum(x @ before[0] + before[1], 0)
    mean = np.mean([hidden[:30].mean(0), hidden[30:].mean(0)], axis=0) * 0.5
    variance = np.mean([hidden[:30].var(0), hidden[30:].var(0)], axis=0) * 0.5 + 0.5
    norm = next(layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(norm.moving_mean), mean, atol=1e-5)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(norm.moving_variance), variance, atol=1e-4)
    drawn = [layer.seed_generator.state.numpy()[1] for layer in model.layers if hasattr(layer, "seed_generator")]
    assert drawn == [1]  # one step, counted once
    history = model.fit(*TRAIN, batch_size=96, epochs=3, verbose=0).history
    assert history["accuracy"][-1] > history["accuracy"][0]
    equal = strategy.gather(strategy.run(lambda: keras.ops.convert_to_tensor(weights_of(model))[None]), axis=0)
    assert bool((equal == equal[0]).all())


@strategy_combinations("mirrored_2", "mirrored_2_workers")
def test_replicas_drop_different_units(strategy: tfd.Strategy) -> None:
    class Told(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.drop = keras.layers.Dropout(0.5, seed=4)
            self.out = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.out(self.drop(x, training=training)) * self.scale

    with strategy.scope():
        model = Told()
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        x = np.ones((2, 1000), "float32")
        model.fit(x, np.zeros((2, 1)), batch_size=2, verbose=0)
    dropped = model.history.history["loss"][0]
    state = model.drop.seed_generator.state.numpy()
    masks = []
    for replica in range(2):
        seed = np.array([(int(state[0]) + replica * 1_000_003) % 2**31, 0], "int32")
        kept = keras.random.dropout(keras.ops.ones((1, 1000)), 0.5, seed=_Fixed(seed))
        masks.append(float(keras.ops.sum(kept)))
    assert masks[0] != masks[1]
    assert dropped == pytest.approx(np.mean(np.square(masks)), rel=1e-5)


class _Fixed(keras.random.SeedGenerator):
    """A generator whose next seed is given."""

    def __init__(self, seed: np.ndarray) -> None:
        super().__init__(seed=0)
        self.state.assign(seed)
