"""Where the processes' shares of a batch differ, the loss of a process weighs by its examples.

A loss is divided by the examples of its process, and gradients are the mean over the processes. Weighed, that is the
mean over all examples, as on one device and as ``strategy.run`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.gradients.by_examples import leaves_of
from tfstyle_dist.input import AutoShardPolicy, shares_under_way
from tfstyle_dist.integrations.accelerate.upstream import BatchSamplerShard
from tfstyle_dist.values import common_share

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy


@contextmanager
def weighed(accelerator: Any, loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The loss of which ``backward`` is to be called inside.

    Args:
        accelerator: a ``StrategyAccelerator``.
        loss: of the batch that is being read.
    """
    weight = _weight(accelerator) if accelerator.num_processes > 1 and _all_weigh(accelerator.strategy) else 1.0
    with ExitStack() as hooks:
        if weight == 0:  # zero times the NaN of a mean over no examples would be NaN
            for leaf in leaves_of([loss]):
                hooks.callback(leaf.register_hook(torch.zeros_like).remove)
        yield loss if weight == 1 else loss * weight


def _all_weigh(strategy: Strategy) -> bool:
    """Whether nobody has asked for sums, or for a mean in which all weigh the same."""
    return all(record.policy is None or record.policy.weighs for record in strategy.parameter_store.records())


def _weight(accelerator: Any) -> float:
    """What the loss of this process counts, where that over an equal share of the batch counts 1."""
    state = accelerator.gradient_state
    if state.in_dataloader:
        takes_part = accelerator.auto_shard_policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
        return _weight_at_end(state) if takes_part and state.end_of_dataloader else 1.0
    share = common_share(shares_under_way(), "StrategyAccelerator.backward was called while batches are read")
    return 1.0 if share is None else share.weight


def _weight_at_end(state: Any) -> float:
    """In the last batch of a loader that accelerate has divided by a policy; only that one may be uneven.

    Args:
        state: accelerate's ``GradientState``: which loader is being read, and how many examples are left for all.
    """
    sampler, left = getattr(state.active_dataloader, "batch_sampler", None), state.remainder
    if not isinstance(sampler, BatchSamplerShard) or not sampler.split_batches or sampler.even_batches or left <= 0:
        return 1.0
    piece: int = sampler.batch_size // sampler.num_processes
    mine: int = min(left - piece * sampler.process_index, piece)
    # A process that gets nothing of the last batch has had its own last one, a whole one, before.
    return mine * sampler.num_processes / left if mine > 0 else 1.0
