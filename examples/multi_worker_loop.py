"""TensorFlow's tutorial "Custom training loop with Keras and MultiWorkerMirroredStrategy", on a character model.

    python -m tfstyle_dist.launch --workers 2 examples/multi_worker_loop.py --directory /tmp/loop    # one host
    torchrun --standalone --nproc-per-node=2 examples/multi_worker_loop.py --directory /tmp/loop
    TF_CONFIG='{"cluster": ..., "task": ...}' python examples/multi_worker_loop.py --directory /shared/loop

It learns to continue the Python language reference, which comes with Python. The folder must be one that all workers
see: start the command again and it goes on from the last checkpoint, also with another number of workers. Every worker
calls `save`; logs are the chief's. The exit code is 1 when the loss has not become smaller.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tfstyle_dist as tfd

LENGTH, GLOBAL_BATCH = 32, 32


def load_text(steps_per_epoch: int) -> TensorDataset:
    """Rows of characters, as numbers below 96, and the characters that follow them."""
    text = "".join(topics[name] for name in sorted(topics))
    rows = text[: (GLOBAL_BATCH * steps_per_epoch) * LENGTH + 1].encode("ascii", "replace")
    codes = (torch.frombuffer(bytearray(rows), dtype=torch.uint8).long() - 32).clamp(0, 95)
    return TensorDataset(codes[:-1].view(-1, LENGTH), codes[1:].view(-1, LENGTH))


class CharacterModel(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(96, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 96)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embedding(codes))[0])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True, help="for the checkpoints; all workers must see it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps-per-epoch", type=int, default=40)
    options = parser.parse_args()

    with tfd.MultiWorkerMirroredStrategy() as strategy:  # who the workers are comes from the environment
        chief = "the chief" if strategy.is_chief else "not the chief"
        print(f"one of {strategy.num_replicas_in_sync} workers, {chief}", flush=True)
        with strategy.scope():
            torch.manual_seed(0)
            model = CharacterModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        data = load_text(options.steps_per_epoch)
        dataset = strategy.experimental_distribute_dataset(data, global_batch_size=GLOBAL_BATCH, shuffle=True, seed=0)

        def train_step(codes: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())
            loss.backward()  # when it returns, p.grad is the mean over all workers
            optimizer.step()
            return loss.detach()

        checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer, batches=iter(dataset), epoch=0, step=0)
        manager = tfd.train.CheckpointManager(checkpoint, options.directory, max_to_keep=2)
        found = manager.restore_or_initialize()
        strategy.print(f"begins at epoch {checkpoint.epoch}, step {checkpoint.step}, from {found or 'nothing'}")

        losses: list[float] = []
        while checkpoint.epoch < options.epochs:
            for batch in checkpoint.batches:
                per_worker = strategy.run(train_step, args=tuple(batch))
                losses.append(float(strategy.reduce("MEAN", per_worker, axis=None)))
                checkpoint.step += 1
                if checkpoint.step % 15 == 0:
                    manager.save(block=False)  # on every worker; the files are written while training goes on
            checkpoint.epoch += 1
            checkpoint.batches = iter(dataset)
            manager.save()
            strategy.print(f"epoch {checkpoint.epoch}: loss {losses[-1]:.3f} after {checkpoint.step} steps", flush=True)
    return 0 if not losses or losses[-1] < losses[0] else 1


if __name__ == "__main__":
    raise SystemExit(main())
