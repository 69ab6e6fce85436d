"""Models and data for the tests of the Keras integration."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import on_devices
import pytest
import torch
from sklearn.datasets import load_digits

import tfstyle_dist as tfd
import tfstyle_dist.integrations.keras  # keras.Model knows strategies from here on

QUIET = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
"""Keras turns torch tensors into NumPy arrays in a way that NumPy 2 warns of."""

SHUFFLES = not on_devices.NAMES
"""What ``fit`` is told where a test asks for nothing: Keras alone draws its order on the device, not as on the CPU."""

Arrays = tuple[np.ndarray, np.ndarray]


def central_ranks() -> tfd.Strategy:
    """Central storage between processes."""
    if on_devices.NAMES:
        pytest.skip("about the CPU: central storage between processes computes there")
    return tfd.experimental.CentralStorageStrategy(["cpu:0"])


def digits() -> tuple[Arrays, Arrays]:
    """Training and test data: 1440 and 357 images of 64 pixels."""
    data = load_digits()
    x, y = (data.data / 16).astype("float32"), data.target.astype("int64")
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def dense(*layers: Any, **compiled: Any) -> keras.Model:
    """A small compiled classifier; the same weights after the same seed."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
            *layers,
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    options = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compiled}
    model.compile(**options)
    return model


def weights_of(model: keras.Model) -> np.ndarray:
    """All weights in one array."""
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


def everywhere(strategy: tfd.Strategy, numbers: Any) -> np.ndarray:
    """A row of numbers of each worker."""
    mine = torch.as_tensor(np.ravel(np.asarray(numbers, dtype=np.float64)))[None]
    return strategy.gather(strategy.run(lambda: mine), axis=0).cpu().numpy()
