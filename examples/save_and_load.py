"""Saves a trained model and loads it on another number of replicas, and without any strategy: Keras and plain PyTorch.

    python examples/save_and_load.py --replicas 2
    torchrun --standalone --nproc-per-node 2 examples/save_and_load.py

Needs `pip install -e '.[keras]'` for the Keras half; --no-keras leaves it out. Real data: breast cancer, 569
patients. The exit code is 1 when a loaded model does not give the same predictions, or none is right in 93 % of cases.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch.nn.functional import binary_cross_entropy_with_logits

import tfstyle_dist as tfd

NUM_TEST = 114


def load_data() -> tuple[np.ndarray, np.ndarray]:
    data = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    return x[order].astype("float32"), data.target[order].astype("float32")


def other_strategy(strategy: tfd.Strategy) -> tfd.Strategy:
    """More replicas than before, where this process may choose."""
    alone = strategy.worker.group.size == 1
    return tfd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) if alone else strategy


def with_keras(strategy: tfd.Strategy, folder: Path) -> list[np.ndarray]:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    import tfstyle_dist.integrations.keras  # noqa: F401  # fit, evaluate and predict know strategies from here on

    x, y = load_data()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1, "sigmoid")])
        model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    model.fit(x[NUM_TEST:], y[NUM_TEST:], batch_size=32, epochs=20, verbose=0)
    if strategy.is_chief:
        model.save(folder / "model.keras")  # weights, optimizer and settings
        model.save_weights(folder / "model.weights.h5")
    strategy.should_stop()  # all wait until the file is there
    predictions = [model.predict(x[:NUM_TEST], verbose=0)[:, 0]]
    plain = keras.models.load_model(folder / "model.keras")  # no scope: no strategy
    predictions.append(plain.predict(x[:NUM_TEST], verbose=0)[:, 0])
    other = other_strategy(strategy)
    with other.scope():
        again = keras.models.load_model(folder / "model.keras")
    predictions.append(again.predict(x[:NUM_TEST], verbose=0)[:, 0])
    again.fit(x[NUM_TEST:], y[NUM_TEST:], batch_size=32, epochs=1, verbose=0)  # goes on with the optimizer's state
    again.load_weights(folder / "model.weights.h5")
    predictions.append(again.predict(x[:NUM_TEST], verbose=0)[:, 0])
    strategy.print(f"Keras: trained on {strategy.num_replicas_in_sync}, loaded on 1 and {other.num_replicas_in_sync}")
    return predictions


def build_plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Flatten(0))


def with_torch(strategy: tfd.Strategy, folder: Path) -> list[np.ndarray]:
    x, y = map(torch.from_numpy, load_data())
    torch.manual_seed(1)
    with strategy.scope():
        model = build_plain()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()

    data = torch.utils.data.TensorDataset(x[NUM_TEST:], y[NUM_TEST:])
    loader = torch.utils.data.DataLoader(data, batch_size=30, shuffle=True, drop_last=True)
    batches = strategy.experimental_distribute_dataset(loader)
    for _ in range(15):
        for batch in batches:
            strategy.run(step, args=batch)
    if strategy.is_chief:
        torch.save(model.state_dict(), folder / "model.pt")  # what a plain model would save
    tfd.train.Checkpoint(model=model, optimizer=optimizer).write(str(folder / "checkpoint"))  # on every worker
    plain = build_plain()
    plain.load_state_dict(torch.load(folder / "model.pt"))
    other = other_strategy(strategy)
    with other.scope():
        again = build_plain()
    tfd.train.Checkpoint(model=again).restore(str(folder / "checkpoint")).expect_partial()
    strategy.print(f"torch: trained on {strategy.num_replicas_in_sync}, loaded on 1 and {other.num_replicas_in_sync}")
    with torch.no_grad():
        tests = [(m, x[:NUM_TEST].to(m[0].weight.device)) for m in (model, plain, again)]
        return [torch.sigmoid(m(inputs)).numpy(force=True) for m, inputs in tests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1, help="local replicas on the CPU, without torchrun")
    parser.add_argument("--no-keras", action="store_true", help="plain PyTorch alone")
    options = parser.parse_args()
    devices = [f"cpu:{i}" for i in range(options.replicas)] if options.replicas > 1 else None
    strategy = tfd.MirroredStrategy(devices)
    good = True
    with tempfile.TemporaryDirectory() as own:
        folder = Path(strategy.worker.group.gather_objects(own, "folder")[0])  # the chief's
        for part in (with_torch,) if options.no_keras else (with_keras, with_torch):
            predictions = part(strategy, folder)
            apart = max(float(np.abs(p - predictions[0]).max()) for p in predictions[1:])
            accuracy = float(((predictions[0] > 0.5) == load_data()[1][:NUM_TEST]).mean())
            strategy.print(f"test accuracy {accuracy:.3f}, largest difference after loading {apart:.1e}")
            good = good and apart < 1e-5 and accuracy >= 0.93
        strategy.should_stop()  # nobody deletes the folder before all have read it
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
