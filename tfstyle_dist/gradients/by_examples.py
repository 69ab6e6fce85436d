"""Where the replicas' shares of a batch differ, the loss of a replica weighs by its examples.

The root of the backward pass is multiplied. So whatever sums the gradients afterwards, and divides them by the number
of replicas (``reducer``), need not know of it, only new gradients are touched when several passes accumulate, and what
replicas exchange within a pass counts right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.runtime.context import Replica
from tfstyle_dist.variables.record import Record


def weighed_by_examples(original: Callable[..., Any], replica: Replica, *args: Any, **kwargs: Any) -> Any:
    """One call of autograd's engine by a replica whose share differs in size from others.

    Args:
        original: the engine.
        replica: the replica's context; it has a share.
        args: of the engine: tensors, their gradients, ...
        kwargs: of the engine.
    """
    roots, gradients, *rest = args
    leaves = _leaves(replica)
    weighing = [r.policy is not None and r.policy.weighs for r, _ in leaves]
    assert replica.share is not None
    weight, some = replica.share.weight, any(weighing)
    if some and not all(weighing):  # this pass may be of one kind alone; what a checkpoint hides is not seen
        reached = {id(leaf) for leaf in leaves_of(roots)}
        seen = [weighs for (_, leaf), weighs in zip(leaves, weighing, strict=True) if id(leaf) in reached]
        some = any(seen) or not seen
    if some:
        _say(replica)
        gradients = tuple(None if g is None else g * weight if weight else torch.zeros_like(g) for g in gradients)
    hooks = []
    try:
        for (_, leaf), weighs in zip(leaves, weighing, strict=True):
            if (hook := _on_leaf(weight, weighs, some)) is not None:
                hooks.append(leaf.register_hook(hook))
        return original(roots, gradients, *rest, **kwargs)
    finally:
        for handle in hooks:
            handle.remove()


def _leaves(replica: Replica) -> list[tuple[Record, torch.Tensor]]:
    """What backward may give a gradient, in this replica's own form."""
    found = []
    for record in replica.strategy.parameter_store.records():
        tensor = record.tensor
        if tensor is None or record.policy is None:
            continue
        leaf = tensor if record.kind == "parameter" else record.components[replica.local_replica_id]
        if leaf.requires_grad:
            found.append((record, leaf))
    return found


_LEAF = "torch::autograd::AccumulateGrad"


def leaves_of(roots: Sequence[torch.Tensor | GradientEdge]) -> Iterator[torch.Tensor]:
    """The leaves that a pass from ``roots`` comes to, each once, but those that a reentrant checkpoint hides."""
    found = {id(root): root for root in roots if isinstance(root, torch.Tensor) and root.is_leaf and root.requires_grad}
    yield from found.values()
    nodes: list[Any] = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        # A function of the program may have a `variable` too.
        if hasattr(node, "variable") and node.name() == _LEAF and id(node.variable) not in found:
            found[id(node.variable)] = node.variable
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def _on_leaf(weight: float, weighs: bool, root_weighs: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What is done to the new gradient of one leaf: zero times the NaN of a mean over no examples would be NaN."""
    if weight == 0:
        return torch.zeros_like if weighs else _without_nan
    if not root_weighs or weighs or weight == 1:
        return None
    return lambda gradient: gradient / weight


def _without_nan(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.is_sparse else torch.where(gradient.isnan(), 0, gradient)


def _say(replica: Replica) -> None:
    share = replica.share
    if replica.replica_id == 0 and share is not None and share.division is not None:
        division, store = share.division, id(replica.strategy.parameter_store)
        warn_once(
            f"weights by examples {store}",
            f"A batch of {division.examples} examples is divided unevenly over {division.replicas} replicas (replica 0 "
            f"has {share.examples}): the mean of their gradients is that over the examples, as on one device. For one "
            "in which all weigh the same call strategy.set_gradient_policy(scale='MEAN').",
        )
        if division.empty:
            warn_once(
                f"replicas without examples {store}",
                f"{division.empty} of {division.replicas} replicas have no example of a batch of {division.examples}: "
                "a mean that such a replica computes is NaN there. It adds nothing to gradients, strategy.reduce, "
                "all_reduce and variables; read the loss through one of these, not with float() on the replica.",
            )
