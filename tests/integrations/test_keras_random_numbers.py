"""torch's random numbers around ``fit``: each worker's steps have their own, the program's stay alike."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import QUIET, SHUFFLES, everywhere

import tfstyle_dist as tfd

pytestmark = [QUIET, pytest.mark.distributed(workers=2, timeout=60)]
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = X.sum(1, keepdims=True)


class Draws(keras.layers.Layer):
    """Adds what torch draws, or nothing, and remembers it."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.numbers = draws, []

    def call(self, x: Any) -> Any:
        if not self.draws or x.is_meta:
            return x
        drawn = torch.rand(3)
        self.numbers.append(drawn.tolist())
        return x + 0.01 * drawn.sum().to(x.device)


def made(scope: Any, draws: bool) -> tuple[keras.Model, Draws]:
    keras.utils.set_random_seed(5)
    layer = Draws(draws)
    with scope:
        model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model, layer


def test_steps_that_draw_leave_the_workers_alike(strategy: tfd.Strategy) -> None:
    """And no number comes twice: not on two workers, and not in two calls."""
    model, layer = made(strategy.scope(), draws=True)
    for _ in range(2):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        model.train_on_batch(X[:8], Y[:8])
        model.predict(X[:8], verbose=0)
        of_the_program = everywhere(strategy, torch.rand(4))
        np.testing.assert_array_equal(of_the_program[0], of_the_program[1])
    drawn = everywhere(strategy, layer.numbers)
    assert drawn.shape == (2, 2 * 8 * 3)
    assert np.unique(drawn).size == drawn.size


def test_steps_that_draw_nothing_let_the_order_be_that_of_one_device(strategy: tfd.Strategy) -> None:
    """The orders of later epochs are drawn after the first steps."""
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        model, _ = made(scope, draws=False)
        found.append(model.fit(X, Y, batch_size=8, epochs=3, verbose=0, shuffle=SHUFFLES).history["loss"])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
