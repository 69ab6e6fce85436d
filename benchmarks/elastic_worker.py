"""A worker of benchmarks/elastic.py: a small model, padded steps, and a log of what it commits."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import tfstyle_dist as tfd

SAVE_EVERY = 100
"""Steps from one checkpoint to the next."""


def work(
    log: str, seconds: float, pad: float, kind: str, replicas: int, check_every: int, suspect_after: float,
    stopped_after: float,
) -> None:  # fmt: skip
    """Trains for some time, and writes the time and number of each committed step.

    Args:
        log: the file to write to; those of all workers are in one folder.
        seconds: of training.
        pad: seconds of sleep in a step.
        kind: of the job, see ``elastic.KINDS``.
        replicas: of an elastic job.
        check_every: see ``Elastic``.
        suspect_after: see ``Elastic``.
        stopped_after: likewise; 0: it is not given.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if kind == "elastic":
        every = check_every or None
        options["elastic"] = tfd.experimental.Elastic(
            replicas=replicas, suspect_after=suspect_after, stopped_after=stopped_after or None, check_every=every
        )
    warm = torch.nn.Parameter(torch.ones(1))  # what torch imports at the first update, before the others wait for it
    warm.grad = torch.ones(1)
    torch.optim.Adam([warm]).step()
    strategy = tfd.MultiWorkerMirroredStrategy(**options)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        number = tfd.Variable(torch.zeros((), dtype=torch.int64))
        over = tfd.Variable(torch.zeros((), dtype=torch.int64))
    x = torch.randn(8, 64)
    checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer, number=number)
    saved = Path(log).with_name("saved")
    if kind == "restart" and saved.exists():
        checkpoint.read(str(saved))

    padded = -2

    def step() -> torch.Tensor:
        nonlocal padded
        before, padded = padded, tfd.get_replica_context().replica_id_in_sync_group
        time.sleep(0 if padded == before + 1 else pad)  # the first replica here; again, if the step is begun again
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return torch.tensor(int(time.time() > end))

    end = time.time() + 1e9
    with open(log, "a") as file:
        print("ready", time.time(), 0, file=file)
    tfd.experimental.join(strategy, step)
    end = float(Path(log).with_name("end").read_text() or 0) if Path(log).with_name("end").exists() else 0.0
    if not end:
        end = time.time() + seconds
        Path(log).with_name("end").write_text(str(end))
    with open(log, "a") as file:
        print("started", time.time(), 0, file=file, flush=True)
        while not int(over):
            padded = -2
            late = strategy.reduce("SUM", strategy.run(step), axis=None)
            over.assign(late)
            number.assign_add(1)
            print("commit", time.time(), int(number), file=file, flush=True)
            if kind == "restart" and int(number) % SAVE_EVERY == 0:
                checkpoint.write(str(saved))
        print("end", time.time(), int(number), file=file, flush=True)
    strategy.close()


if __name__ == "__main__":
    log_file, time_of_all, pad_of_all, kind_of_job, *others = sys.argv[1:]
    numbers = int(others[0]), int(others[1]), float(others[2]), float(others[3])
    work(log_file, float(time_of_all), float(pad_of_all), kind_of_job, *numbers)
