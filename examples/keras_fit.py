"""Trains a small Keras network on handwritten digits with fit, on one or several replicas.

    python examples/keras_fit.py --replicas 2                              # two replicas in this process
    torchrun --standalone --nproc-per-node 2 examples/keras_fit.py         # one replica per process

Needs `pip install -e '.[keras]'`. The global batch stays the same, so the losses are those of one device; the
program says how far they are apart. The exit code is 1 when the test accuracy is below 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfstyle_dist as tfd
import tfstyle_dist.integrations.keras  # fit, evaluate and predict know strategies from here on

Arrays = tuple[np.ndarray, np.ndarray]


def load_data() -> tuple[Arrays, Arrays]:
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype("float32"), digits.target
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def train(scope: Any, data: Arrays, epochs: int, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with scope:
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    model.fit(*data, batch_size=64, epochs=epochs, **options)
    return model


def decayed(epoch: int) -> float:
    return 2e-3 if epoch < 6 else 5e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1, help="local replicas on the CPU, without torchrun")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    devices = [f"cpu:{i}" for i in range(options.replicas)] if options.replicas > 1 else None
    strategy = tfd.MirroredStrategy(devices)
    data, test = load_data()
    # Callbacks run on the chief alone; what they decide holds on every worker.
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.keras")
        callbacks = [
            keras.callbacks.LearningRateScheduler(decayed),
            keras.callbacks.EarlyStopping("val_loss", patience=3),
            keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        ]
        start = time.perf_counter()
        model = train(
            strategy.scope(), data, options.epochs, validation_data=test, verbose=2, callbacks=callbacks
        )  # fmt: skip
        seconds = time.perf_counter() - start
        loss, accuracy = model.evaluate(*test, verbose=0)
        saved = keras.models.load_model(best).evaluate(*test, verbose=0)[1] if strategy.is_chief else None
    alone = train(contextlib.nullcontext(), data, 2, validation_data=test, verbose=0).history.history["loss"]
    apart = float(np.abs(np.subtract(model.history.history["loss"][:2], alone)).max())
    right = int((model.predict(test[0], verbose=0).argmax(1) == test[1]).sum())
    strategy.print(f"{strategy.num_replicas_in_sync} replica(s), {seconds:.1f} s")
    strategy.print(
        f"test loss {loss:.3f}, accuracy {accuracy:.3f} ({right} of {len(test[1])}), of the best file {saved}"
    )
    strategy.print(f"largest difference of a loss to one device: {apart:.1e}")
    return 0 if accuracy >= 0.95 and apart < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
