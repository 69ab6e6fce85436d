"""Gradients of a ``DistributedDataParallel`` model, summed by a strategy."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.rendezvous.bootstrap import default_process_group
from tfstyle_dist.cross_device_ops.collective import widened_type
from tfstyle_dist.integrations.accelerate.upstream import DistributedDataParallelKwargs

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy

_PATIENCE = 0.1  # seconds; the threads need microseconds, once they are let


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
        # DistributedDataParallel has compared the models: the workers' buckets are of one size.
        ops = strategy.cross_device_ops
        method = ops.aggregation_method
        if ops.own_sum is not None:
            flat = ops.own_sum([flat])
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


class StrategyDDPHandler:
    """What ``Accelerator.prepare_model`` asks about ``DistributedDataParallel``: arguments, and the hook to register.

    It stands in ``accelerator.ddp_handler`` in the place of the script's own ``DistributedDataParallelKwargs``. A hook
    that the script asks for there is obeyed; the strategy then does not sum the gradients.

    Args:
        strategy: sums the gradients.
        own: the script's own, or ``None``.
    """

    def __init__(self, strategy: Strategy, own: Any = None) -> None:
        self.strategy = strategy
        self.own = DistributedDataParallelKwargs() if own is None else own

    def __getattr__(self, name: str) -> Any:
        if name in ("own", "strategy"):  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.own, name)

    def to_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of ``DistributedDataParallel``."""
        return dict(self.own.to_kwargs())

    def register_comm_hook(self, model: Any) -> None:
        """Gives a model its communication hook: the script's own if it has one, else the strategy's."""
        hook = self.own.comm_hook
        if str(getattr(hook, "value", hook)) != "no":
            self.own.register_comm_hook(model)
        else:
            model.register_comm_hook(self.strategy, mean_of_bucket)
        watch = weakref.finalize(model, _let_threads_finish, weakref.ref(default_process_group()))
        watch.atexit = False


def _let_threads_finish(known: Callable[[], Any]) -> None:
    """Called when a model is about to be freed; waits a moment if it holds the last reference to its process group.

    torch frees the group while it holds Python's global lock. A thread of Gloo that at that moment wants the lock, to
    let go of the tensors of the last call, would never get it, and both would wait for ever.

    Args:
        known: gives the default group of the time when the model was prepared, if it is still there.
    """
    group = known()
    if group is None or group is not default_process_group():
        time.sleep(_PATIENCE)
