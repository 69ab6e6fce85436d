"""``torch.nn.SyncBatchNorm`` in ``run``: normalises by the examples of all replicas, on every device.

torch's own one knows the processes of a group, and GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfstyle_dist.comm import torch_transport
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.process_hooks import Patch
from tfstyle_dist.runtime.context import Replica, current_replica


def _forward(original: Callable[..., torch.Tensor], module: torch.nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    replica = current_replica()
    by_batch = module.training or module.running_mean is None
    if replica is None or replica.num_replicas_in_sync == 1 or not by_batch:
        return original(module, x)
    _check(module, x, replica.strategy.worker.group.size)
    return _normalize(replica, module, x)


def _check(module: torch.nn.SyncBatchNorm, x: torch.Tensor, num_workers: int) -> None:
    """Refuses what would be normalised otherwise than the program says."""
    if x.dim() < 2:
        raise ValueError(
            f"SyncBatchNorm takes inputs of at least 2 dimensions, got {x.dim()}: {tuple(x.shape)}; the first is that "
            "of the examples, the second that of the channels."
        )
    if x.shape[1] != module.num_features and not (module.weight is None and module.running_mean is None):
        raise ValueError(
            f"SyncBatchNorm({module.num_features}) takes inputs of {module.num_features} channels, got {x.shape[1]}: "
            f"{tuple(x.shape)}; the second dimension is that of the channels. Build it with "
            f"num_features={x.shape[1]}, or change the input."
        )
    group = module.process_group
    if group is not None and (members := torch_transport.members_of(group)) != num_workers:
        whose = "other workers" if members < 0 else f"{members} of the {num_workers} workers"
        raise ValueError(
            f"SyncBatchNorm got a process_group of {whose}, but in strategy.run it normalises by the examples of all "
            "replicas. Leave process_group out for that, or use nn.BatchNorm for the examples of each replica."
        )


def _normalize(replica: Replica, module: torch.nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    others = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    examples = wide.new_tensor([x.numel() // max(x.shape[1], 1)])
    # A share without examples adds nothing. Two sums, not one of squares: no digits are lost where the mean is large.
    total, count = replica.all_reduce(ReduceOp.SUM, [wide.sum(others), examples])
    count = count.detach().clamp(min=1)
    mean = total / count
    centred = wide - mean.view(shape)
    squares = replica.all_reduce(ReduceOp.SUM, (centred * centred).sum(others))
    variance = squares / count
    if module.training and module.running_mean is not None:
        _update(module, mean.detach(), squares.detach() / (count - 1).clamp(min=1))
    y = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        y = y * module.weight.view(shape) + module.bias.view(shape)
    normalized: torch.Tensor = y.to(x.dtype)
    return normalized


def _update(module: torch.nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """The running statistics, of which the variance is that of a sample."""
    assert module.running_mean is not None
    assert module.running_var is not None
    factor: float = 0.0 if module.momentum is None else module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            factor = 1.0 / float(module.num_batches_tracked)
    with torch.no_grad():
        module.running_mean.lerp_(mean.to(module.running_mean), factor)
        module.running_var.lerp_(variance.to(module.running_var), factor)


sync_batch_norms = Patch(torch.nn.SyncBatchNorm, "forward", _forward)
"""Installed while a strategy that adopts modules lives."""
