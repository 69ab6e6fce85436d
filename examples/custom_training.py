"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", with the same names.

    python examples/custom_training.py                                      # one replica
    python examples/custom_training.py --replicas 3                         # three in one process
    torchrun --standalone --nproc-per-node=2 examples/custom_training.py    # two processes of one replica each

Breast cancer data of scikit-learn: 569 patients, 30 measurements, two classes. The loss is divided by the GLOBAL batch
and the gradients are SUMMED, so that the last, smaller batch may split unevenly: the printed losses are the
same for any number of replicas. The exit code is 1 when the test accuracy is below 95 %.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import tfstyle_dist as tfd

EPOCHS, GLOBAL_BATCH, NUM_TEST = 8, 64, 113


def load_data() -> tuple[TensorDataset, TensorDataset]:
    features, target = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = ((x - x.mean(0)) / x.std(0))[order], y[order]
    return TensorDataset(x[NUM_TEST:], y[NUM_TEST:]), TensorDataset(x[:NUM_TEST], y[:NUM_TEST])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1, help="in this process")
    devices = [f"cpu:{replica}" for replica in range(parser.parse_args().replicas)]
    train_data, test_data = load_data()

    with tfd.MirroredStrategy(devices) as strategy, tempfile.TemporaryDirectory() as own:
        directory = strategy.worker.group.gather_objects(own, "folder")[0]  # worker 0's, told to all
        strategy.print(f"number of replicas: {strategy.num_replicas_in_sync}")
        size = {"global_batch_size": GLOBAL_BATCH}
        train = strategy.experimental_distribute_dataset(train_data, **size, shuffle=True, seed=1)
        test = strategy.experimental_distribute_dataset(test_data, **size)

        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
            optimizer = tfd.train.AdamOptimizer(learning_rate=0.01)
            # Metrics: every replica adds what it saw, reading gives the sum.
            on_read, add = tfd.VariableSynchronization.ON_READ, tfd.VariableAggregation.SUM
            right, seen = (tfd.Variable(0.0, synchronization=on_read, aggregation=add) for _ in range(2))
        checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer)

        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            per_example = cross_entropy(model(x), y, reduction="none")
            loss = tfd.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
            optimizer.minimize(loss, var_list=list(model.parameters()))
            return loss.detach()

        @torch.no_grad()
        def test_step(x: torch.Tensor, y: torch.Tensor) -> None:
            right.assign_add((model(x).argmax(1) == y).sum().float())
            seen.assign_add(torch.tensor(float(len(y))))

        for epoch in range(EPOCHS):
            total, steps = 0.0, 0
            for batch in train:
                per_replica = strategy.run(train_step, args=tuple(batch))
                total += float(strategy.reduce("SUM", per_replica, axis=None))
                steps += 1
            for metric in (right, seen):
                metric.assign(torch.tensor(0.0))
            for batch in test:
                strategy.run(test_step, args=tuple(batch))
            accuracy = float(right.value()) / float(seen.value())
            score = f"test accuracy {accuracy:.2%} of {float(seen.value()):g}"
            strategy.print(f"epoch {epoch + 1}: loss {total / steps:.4f}, {score}")
        path = checkpoint.save(f"{directory}/ckpt")

        # The saved model in plain PyTorch, as one would serve it.
        plain = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
        plain.load_state_dict(tfd.train.load_checkpoint(path).state_dict("model"))
        x, y = test_data.tensors
        again = float((plain(x).argmax(1) == y).float().mean())
        strategy.print(f"restored without a strategy: accuracy {again:.2%}")
        strategy.worker.group.gather_objects(None, "done")  # all have read the files
    return 0 if accuracy >= 0.95 and abs(again - accuracy) < 1e-6 else 1


if __name__ == "__main__":
    raise SystemExit(main())
