"""Trains a small network on handwritten digits, on one or more replicas, and compares it with one device.

    python examples/quickstart.py                   # all GPUs, else one CPU replica
    python examples/quickstart.py --replicas 2      # in one process: two GPUs, or two replicas on the CPU
    torchrun --standalone --nproc-per-node=2 examples/quickstart.py     # two processes of one replica each
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/quickstart.py --strategy tpu    # XLA
    python -m tfstyle_dist.launch --workers 2 examples/quickstart.py --strategy multi_worker    # a TF_CONFIG cluster

The data (1797 images of 8 x 8 pixels) come with scikit-learn. The exit code is 1 when the test accuracy is
below 97 %, or when the weights after 50 steps differ from those of one device by more than 1e-5.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import tfstyle_dist as tfd

NUM_TEST = 357  # 20 %; odd on purpose: two replicas get 179 and 178 images
PARITY_STEPS = 50


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pixels, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return images[train], labels[train], images[test], labels[test]


def training_batches(strategy: tfd.Strategy, batch_size: int) -> tfd.DistributedDataset:
    # batch_size counts all replicas. The order is new in each epoch, and the same for any number of replicas.
    images, labels, _, _ = load_data()
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True, generator=generator)
    return strategy.experimental_distribute_dataset(loader)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    # Smooth on purpose: at the kink of a ReLU or a tie of a MaxPool, rounding alone decides where a gradient goes, and
    # the comparison with one device would show a jump that is nobody's error.
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, padding=1), nn.GELU()
    model = nn.Sequential(*convolutions, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_strategy(name: str, replicas: int | None) -> tfd.Strategy:
    gpus = torch.cuda.device_count()
    if name in ("one_device", "tpu"):
        return tfd.TPUStrategy() if name == "tpu" else tfd.OneDeviceStrategy("cuda:0" if gpus else "cpu:0")
    kind = tfd.MultiWorkerMirroredStrategy if name == "multi_worker" else tfd.MirroredStrategy
    if replicas is None:
        return kind()  # started by a launcher: this process is one replica of many
    return kind(devices=[f"cuda:{r % gpus}#{r // gpus}" if gpus else f"cpu:{r}" for r in range(replicas)])


def weights_on_one_device(start: dict[str, torch.Tensor], device: torch.device, batch_size: int) -> Any:
    """The weights after the first steps of the same job in plain PyTorch, with the same whole batches."""
    with device:
        model, optimizer = build()
    model.load_state_dict(start)
    with tfd.OneDeviceStrategy(device) as one:
        batches = training_batches(one, batch_size)
        epochs = itertools.chain.from_iterable(itertools.repeat(batches))
        for x, y in itertools.islice(epochs, PARITY_STEPS):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train(strategy: tfd.Strategy, epochs: int, batch_size: int) -> int:
    _, labels, *test_data = load_data()
    num_replicas, num_steps = strategy.num_replicas_in_sync, len(labels) // batch_size
    # Gradients of a plain torch.optim optimizer are AVERAGED over the replicas. The average of the replicas' mean
    # losses, which is printed, is that of the global batch only if the shares are equal, so batches split evenly here.
    if len(labels) % batch_size or batch_size % num_replicas or epochs * num_steps < PARITY_STEPS:
        wanted = f"divide {len(labels)} and be a multiple of {num_replicas}"
        raise SystemExit(f"--batch-size must {wanted}; --epochs must give at least {PARITY_STEPS} steps.")
    torch.backends.cudnn.allow_tf32 = False  # full precision, for the comparison with one device
    devices = strategy.experimental_local_results(strategy.run(lambda: tfd.get_replica_context().device))
    torch.manual_seed(0)
    with strategy.scope(), devices[0]:  # what is built in the scope gets a copy on each replica
        model, optimizer = build()
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # once on each replica, with its share
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()  # when it returns, p.grad is the mean over the replicas
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        right = model(x).argmax(1) == y
        return right.sum(), torch.tensor(len(y), device=y.device)

    batches = training_batches(strategy, batch_size)
    (test_batch,) = strategy.experimental_distribute_dataset([tuple(test_data)])  # one batch of all
    step, parity, accuracy = 0, float("nan"), 0.0
    strategy.print(f"{num_replicas} replica(s): {strategy}")
    bar = tqdm(total=epochs * num_steps, desc="training", unit="step", disable=not strategy.is_chief)
    for epoch in range(epochs):
        total = 0.0
        for batch in batches:
            losses = strategy.run(train_step, args=batch)
            # Every worker must call reduce, not the chief alone. Equal shares: the mean of means is the mean.
            total += float(strategy.reduce("MEAN", losses, axis=None))
            step += 1
            bar.update()
            if step == PARITY_STEPS:
                one = torch.device("cpu") if devices[0].type == "xla" else devices[0]
                expected = weights_on_one_device(start, one, batch_size)
                weights = nn.utils.parameters_to_vector(model.parameters()).detach().to(one)
                parity = float((weights - expected).abs().max() / expected.abs().max())
        # The shares of the test set differ by one image, so add counts; a mean of accuracies would be wrong.
        counts = strategy.run(test_step, args=test_batch)
        right, seen = (int(strategy.reduce("SUM", count, axis=None)) for count in counts)
        accuracy = right / seen
        if strategy.is_chief:
            score = f"test accuracy {accuracy:.2%} ({right} of {seen})"
            bar.write(f"epoch {epoch + 1}: loss {total / num_steps:.4f}, {score}")
    bar.close()
    strategy.print(f"parity with one device after {PARITY_STEPS} steps: max|dw|/max|w| = {parity:.1e}")
    return 0 if accuracy >= 0.97 and parity <= 1e-5 else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["mirrored", "multi_worker", "one_device", "tpu"], default="mirrored")
    parser.add_argument("--replicas", type=int, help="replicas in this process; default: as many as GPUs")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=48, help="of all replicas together")
    options = parser.parse_args()
    with make_strategy(options.strategy, options.replicas) as strategy:
        return train(strategy, options.epochs, options.batch_size)


if __name__ == "__main__":
    raise SystemExit(main())
