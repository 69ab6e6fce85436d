"""Save a training job, go on with another number of replicas, and load the model in plain PyTorch.

    python examples/checkpoints.py --replicas 2                                     # two replicas in one process
    torchrun --standalone --nproc-per-node=2 examples/checkpoints.py                # two processes, one replica each

A job stops in the middle of an epoch; another one goes on from its checkpoint, in one process with one replica more.
The exit code is 1 when the weights at the end differ from those of a job that never stopped, or when plain PyTorch
reads something else than was saved.

An application does less: build the objects, `restore_or_initialize()`, train, `save()` now and then. After a crash the
same command goes on. Give --directory to see the files; without it they are deleted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd

STEPS, STOP = 14, 7  # an epoch has 10 steps


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


class Job:
    """Everything that is saved, and the steps."""

    def __init__(self, strategy: tfd.Strategy, directory: str) -> None:
        with strategy.scope():
            self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        x = torch.randn(240, 4, generator=torch.Generator().manual_seed(1))
        data, order = TensorDataset(x, x.prod(1, keepdim=True)), torch.Generator().manual_seed(2)
        loader = DataLoader(data, batch_size=24, shuffle=True, generator=order)
        self.strategy, self.dataset = strategy, strategy.experimental_distribute_dataset(loader)
        self.checkpoint = tfd.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            batches=iter(self.dataset),  # the position in the epoch
            random=tfd.train.RandomState(),  # for dropout and the like
            step=0,
        )
        self.manager = tfd.train.CheckpointManager(self.checkpoint, directory, max_to_keep=2)
        self.restored = self.manager.restore_or_initialize()  # None in an empty folder

    def _train_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def train(self, last: int) -> torch.Tensor:
        """Trains up to a step, and returns the weights."""
        saved = self.checkpoint
        while saved.step < last:
            for batch in saved.batches:
                self.strategy.run(self._train_step, args=batch)
                self.schedule.step()
                saved.step += 1
                if saved.step % 3 == 0:  # every worker calls it; the files are written while training goes on
                    self.manager.save(block=False)
                if saved.step == last:
                    break
            else:
                saved.batches = iter(self.dataset)  # the next epoch
        self.manager.save()
        return weights(self.model)


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu().clone()


def make_strategy(replicas: int | None) -> tfd.Strategy:
    if replicas is None:  # under torchrun: this process is one replica of many
        return tfd.MirroredStrategy()
    gpus = torch.cuda.device_count()
    return tfd.MirroredStrategy([f"cuda:{r % gpus}#{r // gpus}" if gpus else f"cpu:{r}" for r in range(replicas)])


def compare(replicas: int | None, directory: str) -> int:
    with make_strategy(replicas) as strategy:
        torch.manual_seed(0)
        expected = Job(strategy, f"{directory}/never-stopped").train(STEPS)
        torch.manual_seed(0)
        Job(strategy, f"{directory}/stopped").train(STOP)
    with make_strategy(None if replicas is None else replicas + 1) as strategy:
        job = Job(strategy, f"{directory}/stopped")  # other random weights, until they are restored
        strategy.print(f"{strategy.num_replicas_in_sync} replica(s) go on at step {job.checkpoint.step}")
        found = job.train(STEPS)
        difference = float((found - expected).abs().max())
        strategy.print(f"largest difference to a job that never stopped: {difference:.1e}")
        plain = make_model()
        plain.load_state_dict(tfd.train.load_checkpoint(f"{directory}/stopped").state_dict("model"))
        same = torch.equal(weights(plain), found)
        strategy.print(f"plain PyTorch reads the same weights: {same}")
        strategy.worker.group.gather_objects(None, "done")  # all have read the files
    return 0 if difference <= 1e-5 and same else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="in this process; default: one for each process of torchrun")
    parser.add_argument("--directory", help="an empty folder, on a disk that all hosts share")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            with make_strategy(options.replicas) as strategy:  # a folder of worker 0's, told to all
                own = stack.enter_context(tempfile.TemporaryDirectory()) if strategy.is_chief else None
                directory = strategy.worker.group.gather_objects(own, "folder")[0]
        return compare(options.replicas, directory)


if __name__ == "__main__":
    raise SystemExit(main())
