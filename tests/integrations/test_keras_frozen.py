"""Networks that are frozen where the model is built and that a ``train_step`` makes trainable for a while."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import torch
from keras import ops
from keras_models import QUIET, central_ranks, weights_of

import tfstyle_dist as tfd
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

pytestmark = QUIET
CENTRAL = NamedStrategy("central_2", lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]))
CENTRAL_RANKS = NamedStrategy("central_2_workers", central_ranks, 2)
ALL = strategy_combinations("mirrored_2", CENTRAL, "mirrored_2_workers", CENTRAL_RANKS, timeout=120)
X = np.random.default_rng(0).normal(size=(19, 6)).astype("float32")


def network(ends_with: int) -> keras.Model:
    last = keras.layers.Dense(ends_with, kernel_regularizer="l2")
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), last])


class Adversaries(keras.Model):
    """The discriminator is frozen but while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator, self.built = network(6), network(1), True
        self.discriminator.trainable = False
        self.of_generator, self.of_discriminator = (keras.optimizers.Adam(0.02) for _ in range(2))

    def call(self, x: Any) -> Any:
        return self.generator(x)

    def improve(self, network: Any, optimizer: Any, loss: Any) -> Any:
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([w.value.grad for w in network.trainable_weights], network.trainable_weights)
        return loss.detach()

    def discriminated(self, x: Any) -> Any:
        self.discriminator.trainable = True
        loss = ops.mean(self.discriminator(self.generator(x))) - ops.mean(ops.tanh(self.discriminator(x)))
        loss = loss + sum(self.discriminator.losses)
        return self.improve(self.discriminator, self.of_discriminator, loss)

    def generated(self, x: Any) -> Any:
        self.discriminator.trainable = False
        return self.improve(self.generator, self.of_generator, -ops.mean(self.discriminator(self.generator(x))))

    def train_step(self, x: Any) -> dict[str, Any]:
        return {"d": self.discriminated(x), "g": self.generated(x)}


class GeneratorFirst(Adversaries):
    """Leaves the discriminator trainable."""

    def train_step(self, x: Any) -> dict[str, Any]:
        return {"g": self.generated(x), "d": self.discriminated(x)}


class ClippedBefore(Adversaries):
    """Assigns to what is frozen and then trains it."""

    def train_step(self, x: Any) -> dict[str, Any]:
        for weight in self.discriminator.weights:
            weight.assign(ops.clip(weight, -0.1, 0.1))
        return super().train_step(x)


def trained(scope: Any, kind: type[Adversaries]) -> tuple[dict[str, list[float]], np.ndarray]:
    keras.utils.set_random_seed(3)
    with scope:
        model = kind()
        model.compile()
    for _ in range(2):
        history = model.fit(X, batch_size=6, shuffle=False, verbose=0).history
    return history, np.array(weights_of(model))


@ALL
def test_what_a_step_makes_trainable_is_trained(strategy: tfd.Strategy) -> None:
    for kind in (Adversaries, GeneratorFirst, ClippedBefore):
        (history, weights), (theirs, others) = (trained(s, kind) for s in (contextlib.nullcontext(), strategy.scope()))
        assert all(np.allclose(history[name], theirs[name], atol=1e-5) for name in history), kind
        assert np.allclose(weights, others, atol=2e-5), (kind, np.abs(weights - others).max())
