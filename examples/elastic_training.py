"""Training that survives: it kills its own workers again and again, and ends with the weights of an undisturbed run.

    python -m tfstyle_dist.launch --workers 4 --elastic --max-restarts 20 examples/elastic_training.py --kill-every 3

Now and then one worker, drawn by lot, kills itself with SIGKILL in the middle of a step. The others do the step again
without it, the launcher starts it again, and it comes back with the state from their memory. The bar shows who is
there. Run it once without --kill-every, where nobody dies: the digest of the weights in the last line is the same.
With --first-kill 4 the last worker kills itself in step 4, once, however fast the machine is.
Alone: python examples/elastic_training.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import torch

import tfstyle_dist as tfd

REPLICAS, BATCH_SIZE, NUM_SAMPLES = 4, 32, 320


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))


def bar(strategy: tfd.Strategy, done: int, steps: int, loss: float, busy: float, since: float) -> str:
    counts = strategy.report(quiet=True).elastic
    assert counts is not None
    filled = 30 * done // steps
    here = "".join(str(w) if w in counts.members else "-" for w in range(REPLICAS))
    goodput = busy / max(time.monotonic() - since, busy)
    return (
        f"[{'#' * filled}{'.' * (30 - filled)}] step {done}/{steps}  workers {here}  retried {counts.retried}  "
        f"goodput {goodput:.0%}  loss {loss:.4f}"
    )


def train(strategy: tfd.Strategy, epochs: int, pause: float, in_step: Callable[[int, bool], None]) -> str:
    """Returns the digest of the weights."""
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        epoch = tfd.Variable(torch.zeros((), dtype=torch.int64))  # what the loop depends on goes on with the others'
        done = tfd.Variable(torch.zeros((), dtype=torch.int64))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dataset = strategy.experimental_distribute_dataset(data(), global_batch_size=BATCH_SIZE, shuffle=True)
    steps = epochs * len(dataset)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        in_step(int(done), came_back)
        optimizer.step()
        return loss.detach()

    came_back = tfd.experimental.join(strategy, step, schedule)  # a worker that was started again: a member from here
    if came_back:
        print(f"came back in step {int(done)}", flush=True)
    since, busy = time.monotonic(), 0.0
    while int(epoch) < epochs:
        for x, y in dataset:
            began, retried = time.monotonic(), strategy.report(quiet=True).elastic.retried
            losses = strategy.run(step, args=(x, y))
            time.sleep(pause)
            if strategy.report(quiet=True).elastic.retried == retried:
                busy += time.monotonic() - began
            done.assign_add(1)
            if strategy.is_chief:
                mean = float(strategy.reduce("MEAN", losses, axis=None))
                print(bar(strategy, int(done), steps, mean, busy, since), flush=True)
        schedule.step()
        epoch.assign_add(1)
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.contiguous().numpy().tobytes())
    return weights.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="mean, of each worker")
    parser.add_argument("--first-kill", type=int, metavar="STEP", help="of the last worker, in its first life")
    parser.add_argument("--pause", type=float, default=0.05, metavar="SECONDS", help="makes steps long enough to see")
    options = parser.parse_args()
    lot = random.Random(os.getpid())
    die_at = time.monotonic() + lot.expovariate(1 / options.kill_every) if options.kill_every else None

    def in_step(number: int, came_back: bool) -> None:
        workers = strategy.cluster_resolver.cluster_spec().as_dict().get("worker", [])
        last = strategy.cluster_resolver.task_id == len(workers) - 1
        planned = last and number == options.first_kill and not came_back
        if planned or (die_at is not None and time.monotonic() > die_at):
            print("this worker kills itself in the middle of a step", flush=True)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    elastic = tfd.experimental.Elastic(replicas=REPLICAS)
    with tfd.MultiWorkerMirroredStrategy(elastic=elastic) as strategy:
        weights = train(strategy, options.epochs, options.pause, in_step)
        if strategy.is_chief:
            print(strategy.report(quiet=True))
            print(f"weights {weights}")


if __name__ == "__main__":
    main()
