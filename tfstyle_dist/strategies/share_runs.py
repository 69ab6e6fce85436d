"""What one replica runs, and what is kept from counting where it has no examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tfstyle_dist.core import nest
from tfstyle_dist.values import note_result

if TYPE_CHECKING:
    from tfstyle_dist.strategies.replica_context import ReplicaContext

_OWN_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def of_share(
    context: ReplicaContext, fn: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
) -> Any:
    """Calls the step function of one replica.

    Args:
        context: the replica's; it is entered.
        fn: the step function.
        arguments: this replica's.
        keywords: this replica's.

    Returns:
        What ``fn`` returned. Where some replica has no examples that is noted of the tensors in it, so that a mean over
        no examples can be told from a result.
    """
    share = context.share
    if share is None or not share.some_empty:
        return fn(*arguments, **keywords)
    if share.examples:
        result = fn(*arguments, **keywords)
    else:
        with _statistics_kept(context), _empty_share_told():
            result = fn(*arguments, **keywords)
    note_what_it_gives(context, result)
    return result


def note_what_it_gives(context: ReplicaContext, value: Any) -> None:
    """Notes of the tensors that one replica hands to cross-replica context which share they were computed of.

    Args:
        context: the replica's.
        value: a nest: what its step returns, or gives to ``merge_call``.
    """
    share = context.share
    if share is not None and share.some_empty:
        for leaf in nest.leaves(value):
            note_result(leaf, share)


@contextmanager
def _empty_share_told() -> Iterator[None]:
    """Adds to an error of a step that it got no example: not every function takes an empty tensor."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "[tfstyle_dist] this replica's share of the batch was empty. Leave out there what cannot take an empty "
            "tensor, such as the update of some metrics: if len(x) > 0: metric.update(...)"
        )
        raise


@contextmanager
def _statistics_kept(context: ReplicaContext) -> Iterator[None]:
    """BatchNorm counts batches: one of no examples is none."""
    records = context.strategy.parameter_store.records()
    modules = {id(m): m for r in records if r.module is not None and isinstance(m := r.module(), _OWN_STATISTICS)}
    with torch.no_grad():
        before = [(module, {k: b.clone() for k, b in module.named_buffers()}) for module in modules.values()]
    yield
    with torch.no_grad():
        for module, buffers in before:
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
