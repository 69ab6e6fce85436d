"""Making buffers (BatchNorm statistics and the like) equal over all replicas, when the user asks for it."""

from __future__ import annotations

import torch

from tfstyle_dist.core.enums import ReduceOp, VariableAggregation
from tfstyle_dist.cross_device_ops.collective import reduce_over_workers
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables import ParameterStore, Record
from tfstyle_dist.variables.record import raw


def synchronize(worker: Worker, store: ParameterStore) -> None:
    """Averages buffers of aggregation MEAN, copies the first replica's for the others; one message per kind."""
    if worker.num_replicas == 1:
        return
    store.settle()
    ops = store.strategy.cross_device_ops
    groups: dict[tuple[torch.dtype, VariableAggregation, torch.device], list[Record]] = {}
    for record in store.alive_everywhere(list(store.records("buffer"))):
        first = record.components[0]
        groups.setdefault((first.dtype, record.aggregation, first.device), []).append(record)
    with torch.no_grad(), raw():
        for (dtype, aggregation, _), records in groups.items():
            if aggregation is VariableAggregation.MEAN:
                flat = torch.cat([ops.sum_values([c.detach() for c in r.components]).reshape(-1) for r in records])
                flat = reduce_over_workers(worker, ReduceOp.MEAN, flat, f"buffers ({dtype})")
            else:
                flat = torch.cat([r.components[0].detach().reshape(-1) for r in records])
                worker.group.broadcast(flat, 0, f"buffers ({dtype})")
            offset = 0
            for record in records:
                count = record.components[0].numel()
                for component in list(record.components):
                    component.copy_(flat[offset : offset + count].view(component.shape))
                offset += count
