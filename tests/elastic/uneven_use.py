"""A worker of a job of two replicas, each of which uses a parameter of its own; prints the gradients of three steps."""

from __future__ import annotations

import json
import sys

import torch

import tfstyle_dist as tfd

zeroes = sys.argv[1] == "1"
with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2, suspect_after=30)) as strategy:
    with strategy.scope():
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(2)])

    def step(number: int) -> None:
        replica = tfd.get_replica_context().replica_id_in_sync_group
        if zeroes:
            model.zero_grad()
        (model[replica] * (10 * number + replica + 1)).sum().backward()

    found = []
    for number in range(3):
        strategy.run(step, args=(number,))
        found.append([float(parameter.grad) for parameter in model])
print("result", json.dumps(found), flush=True)
