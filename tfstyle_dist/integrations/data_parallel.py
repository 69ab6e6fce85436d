"""Models of ``DistributedDataParallel``, and tensors of the processes, summed by a strategy; for all libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.rendezvous.bootstrap import before_default_group
from tfstyle_dist.cross_device_ops.collective import sparse_sum_over_workers, widened_type

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy

before_default_group()  # the library makes that group, mostly before the script makes its optimizer


def is_elastic(strategy: Strategy) -> bool:
    """Whether the workers of a strategy may change: no library's processes do."""
    from tfstyle_dist.strategies.elastic import ElasticWorker

    return isinstance(strategy.worker, ElasticWorker)


def sum_gradients_by(strategy: Strategy, model: Any) -> None:
    """Gives a model its communication hook: each bucket of gradients becomes the strategy's mean.

    Args:
        strategy: its group has the same members as the one of the model.
        model: of ``DistributedDataParallel``.
    """
    model.register_comm_hook(strategy, mean_of_bucket)


def mean_of_bucket(strategy: Strategy, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: replaces a bucket of gradients by their mean over the workers.

    The sum is the strategy's: in the order of its aggregation method, through its group. float16 and bfloat16 are
    summed in float32.

    Args:
        strategy: its group has the same members as the one of the model.
        bucket: a ``GradBucket`` of torch.

    Returns:
        A future that is done and holds the bucket's buffer.
    """
    buffer: torch.Tensor = bucket.buffer()
    flat = buffer.to(widened_type(buffer.dtype))
    group = strategy.worker.group
    if group.size > 1:
        name = f"gradients[{bucket.index()}]"
        ops = strategy.cross_device_ops
        method = ops.aggregation_method
        if ops.own_sum is not None:
            flat = ops.own_sum([flat])
        if flat.is_sparse:  # of one parameter, such as the table of an Embedding(sparse=True)
            flat = sparse_sum_over_workers(strategy.worker, flat, name)
        else:
            # DistributedDataParallel has compared the models: the workers' buckets are of one size.
            group.all_reduce_async(flat, name, agreed=True, method=method).wait()
        flat.div_(group.size)
    if flat is not buffer:
        buffer.copy_(flat)
    devices = [buffer.device] if buffer.device.type != "cpu" else None
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    done.set_result(buffer)
    return done


# DistributedDataParallel takes a hook without annotations, but none whose annotations are text.
mean_of_bucket.__annotations__.clear()


def sum_of_processes(strategy: Strategy, value: torch.Tensor, name: str, mean: bool) -> torch.Tensor:
    """The sum, or the mean, of one tensor of each worker, in the order of the strategy's aggregation method.

    Args:
        strategy: through its group.
        value: of one shape on all workers.
        name: of what is computed, for errors.
        mean: whether to divide by the number of workers.

    Returns:
        A new tensor, the same on all workers, without gradients; the mean of whole numbers has fractions.
    """
    group, ops = strategy.worker.group, strategy.cross_device_ops
    flat = value.detach().to(widened_type(value.dtype), copy=True).contiguous().reshape(-1)
    group.all_reduce(flat, name, ops.aggregation_method)
    total = flat.reshape(value.shape)
    if mean:
        total = total / group.size
    return total.to(value.dtype) if value.is_floating_point() else total
