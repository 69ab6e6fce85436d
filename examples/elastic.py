"""Training that goes on when hosts go and come: from the last checkpoint, with as many workers as there are then.

On each host (2 to 4 of them; a host that died can come back, another one can join):

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2:4 --nproc-per-node=1 --max-restarts=100 \
        --rdzv-backend=c10d --rdzv-endpoint=<first host>:29400 \
        examples/elastic.py --directory /shared/elastic

Alone: python examples/elastic.py --directory /tmp/elastic. Stop it with Ctrl-C and start it again: it goes on.

The folder must be on a disk that all hosts share. Every sample of every epoch is trained on exactly once: what was done
after the last checkpoint is undone by restoring it, weights and position together. The program counts the samples in a
variable that is saved as well, and its exit code is 1 when the count is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd

NUM_SAMPLES, BATCH_SIZE = 240, 24  # the batch divides evenly over 1, 2, 3, 4, 6 or 8 replicas


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return TensorDataset(torch.arange(NUM_SAMPLES), x, x.sin().sum(1, keepdim=True))


def train(
    strategy: tfd.Strategy, directory: str, epochs: int, save_every: int, after_step: Callable[[int], None]
) -> int:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        # How often each sample was trained on: every replica adds its own, and all have the sum.
        seen = tfd.Variable(torch.zeros(NUM_SAMPLES, dtype=torch.int64), aggregation=tfd.VariableAggregation.SUM)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        seen.assign_add(torch.bincount(ids, minlength=NUM_SAMPLES))
        return loss.detach()

    # The order is a function of the seed and the epoch alone, so the position in it holds for any number of workers.
    loader = DataLoader(data(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(1))
    dataset = strategy.experimental_distribute_dataset(loader)
    checkpoint = tfd.train.Checkpoint(
        model=model, optimizer=optimizer, seen=seen, batches=iter(dataset), epoch=0, step=0
    )
    manager = tfd.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    path = manager.restore_or_initialize()  # all workers call it, as they call save
    workers = strategy.num_replicas_in_sync
    strategy.print(f"{workers} worker(s) begin at step {checkpoint.step}, from {path or 'nothing'}", flush=True)
    loss = float("nan")
    while checkpoint.epoch < epochs:
        for batch in checkpoint.batches:
            loss = float(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None))
            checkpoint.step += 1
            if checkpoint.step % save_every == 0:
                manager.save(block=False)  # written while training goes on
            after_step(checkpoint.step)
        checkpoint.epoch += 1
        checkpoint.batches = iter(dataset)
    manager.save()
    return report(strategy, model, seen, epochs, loss)


def report(strategy: tfd.Strategy, model: nn.Module, seen: tfd.Variable, epochs: int, loss: float) -> int:
    def weights() -> torch.Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach()[None]

    everywhere = strategy.gather(strategy.run(weights), axis=0)  # one row for each replica
    equal = bool((everywhere == everywhere[0]).all()) and bool(everywhere.isfinite().all())
    counts = seen.value()
    strategy.print(f"samples seen {int(counts.min())} to {int(counts.max())} times in {epochs} epochs, loss {loss:.4f}")
    strategy.print(f"weights finite and equal on {len(everywhere)} replica(s): {equal}", flush=True)
    return 0 if equal and bool((counts == epochs).all()) else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True, help="for the checkpoints; on a disk that all hosts share")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=3, help="steps between two checkpoints")
    options = parser.parse_args()
    with tfd.MirroredStrategy() as strategy:
        return train(strategy, options.directory, options.epochs, options.save_every, lambda step: None)


if __name__ == "__main__":
    raise SystemExit(main())
