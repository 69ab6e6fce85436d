"""Trains on handwritten digits with one copy of the weights and of Adam's state, and says where everything is.

    python examples/central_storage.py                  # all GPUs (weights in host memory), else one CPU replica
    python examples/central_storage.py --replicas 2     # in one process: two replicas on the CPU, one copy
    torchrun --standalone --nproc-per-node=2 examples/central_storage.py    # two processes, one copy in shared memory

The data (1797 images of 8 x 8 pixels) come with scikit-learn. The exit code is 1 when the test accuracy is below 95 %.
The step function is the one of any strategy; only the strategy's name says that there is one copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd

EPOCHS, BATCH, NUM_TEST = 10, 64, 357


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return images[train], labels[train], images[test], labels[test]


def memory_of_this_process() -> str:
    """Pages shared with another process count in parts; only Linux tells."""
    told = Path("/proc/self/smaps_rollup")
    lines = told.read_text().splitlines() if told.exists() else []
    return next((f"{int(line.split()[1]) / 1024:.0f} MiB" for line in lines if line.startswith("Pss:")), "not known")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="replicas in this process, on the CPU; default: what is found")
    parser.add_argument("--width", type=int, default=256, help="of the hidden layers")
    options = parser.parse_args()
    devices = None if options.replicas is None else [f"cpu:{r}" for r in range(options.replicas)]
    images, labels, test_images, test_labels = load_data()

    with tfd.experimental.CentralStorageStrategy(devices) as strategy:
        with strategy.scope():
            torch.manual_seed(0)
            width = options.width
            hidden = nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
            model = nn.Sequential(*hidden, nn.Linear(width, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True, drop_last=True, generator=order)
        batches = strategy.experimental_distribute_dataset(loader)

        def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()  # the replicas' gradients are summed where the weights are
            optimizer.step()  # one update of the one copy
            return loss.detach()

        def count_right(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                return (model(batch[0]).argmax(1) == batch[1]).sum()

        for epoch in range(EPOCHS):
            for batch in batches:
                loss = strategy.run(step, args=(batch,))
            mean = strategy.reduce("MEAN", loss, axis=None)
            strategy.print(f"epoch {epoch + 1}: loss {float(mean):.4f}")

        tests = strategy.experimental_distribute_dataset([(test_images, test_labels)])
        right = sum(int(strategy.reduce("SUM", strategy.run(count_right, args=(b,)), axis=None)) for b in tests)
        strategy.print(f"test accuracy {right / NUM_TEST:.2%} ({right} of {NUM_TEST})")

        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        state = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
        (home,) = strategy.extended.parameter_devices
        strategy.print(
            f"{strategy.num_replicas_in_sync} replica(s), parameters on {home}: {weights / 2**20:.1f} MiB of weights "
            f"and {state / 2**20:.1f} MiB of optimizer state, once"
        )
        print(f"memory of this process: {memory_of_this_process()}", flush=True)
        if right / NUM_TEST < 0.95:
            raise SystemExit("The test accuracy is below 95 %.")


if __name__ == "__main__":
    main()
