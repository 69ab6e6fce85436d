"""Trains a Keras network on handwritten digits on several workers; a job that was cut off goes on where it was.

    python -m tfstyle_dist.launch --workers 2 examples/multi_worker_keras.py      # TF_CONFIG, as with TensorFlow
    torchrun --standalone --nproc-per-node 2 examples/multi_worker_keras.py

Needs `pip install -e '.[keras]'`. With --directory a folder that all workers see: started again with more
--epochs the program continues from its last epoch. The exit code is 1 when the test accuracy is below 95 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd
import tfstyle_dist.integrations.keras  # fit, evaluate and predict know strategies from here on

PER_REPLICA = 32


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def build_and_compile() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Progress(keras.callbacks.Callback):
    """Says who has come how far; callbacks with this mark run on every worker."""

    on_every_worker = True

    def __init__(self, strategy: tfd.Strategy) -> None:
        super().__init__()
        self.worker = strategy.cluster_resolver.task_id

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        print(f"worker {self.worker} epoch {epoch + 1}: {numbers}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--directory", help="keeps the state of the job from start to start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    strategy = tfd.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build_and_compile()
    # The batch size of the DataLoader is that of all replicas together; each sample is read by one worker.
    train, test = load_data()
    loader = DataLoader(train, batch_size=PER_REPLICA * strategy.num_replicas_in_sync, shuffle=True)
    with tempfile.TemporaryDirectory() as temporary:
        state = os.path.join(options.directory or temporary, "state")
        callbacks = [keras.callbacks.BackupAndRestore(state, delete_checkpoint=False), Progress(strategy)]
        history = model.fit(loader, shuffle=False, epochs=options.epochs, verbose=0, callbacks=callbacks)
    strategy.print(f"epochs {[e + 1 for e in history.epoch]} on {strategy.num_replicas_in_sync} replicas")
    _, accuracy = model.evaluate(DataLoader(test, batch_size=100), verbose=0)
    predicted = model.predict(DataLoader(test, batch_size=100), verbose=0).argmax(1)
    right = int((predicted == np.asarray(test.tensors[1])).sum())
    strategy.print(f"test accuracy {accuracy:.3f} ({right} of {len(test)})")
    return 0 if accuracy >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
