"""A worker of a job of two, whose rate follows a counter of the program; worker 1 is killed and begins with another."""

from __future__ import annotations

import json
import os
import signal

import torch
from elastic_train import wait_for_the_lost

import tfstyle_dist as tfd

torch.manual_seed(0)
index, life = json.loads(os.environ["TF_CONFIG"])["task"]["index"], int(os.environ["LIFE"])
strategy = tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2, suspect_after=30))
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = tfd.Variable(0)


def step() -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


tfd.experimental.join(strategy, step)
counter = 0
while int(done) < 12:
    if int(done) == 6 and "WORKERS" in os.environ:
        wait_for_the_lost(strategy, 6)
    if (index, life, int(done)) == (1, 0, 3) and "WORKERS" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + counter)
    strategy.run(step)
    counter += 1
    done.assign_add(1)
print("result " + json.dumps(model.weight.tolist()), flush=True)
strategy.close()
