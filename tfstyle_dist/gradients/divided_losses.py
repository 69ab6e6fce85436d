"""Losses that ``nn.compute_average_loss`` divided by the global batch, and gradients that are divided once more.

The parts of such a loss are to be summed. For ``torch.optim`` ``backward()`` takes their mean unless the program says
otherwise, so the gradients would be too small by the number of replicas. A warning says it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.gradients.by_examples import leaves_of
from tfstyle_dist.runtime.context import Replica
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.store import ParameterStore

_MARK = "tfstyle_dist: a part of the average over the global batch"
_SUMS = ("AddBackward0", "SubBackward0")
_PASSES = 3  # so many are looked at; a program repeats its step
_MOST_TERMS = 100  # of a loss

_marked: list[bool] = []  # not empty once there was such a loss
_found: weakref.WeakKeyDictionary[ParameterStore, list[set[int]]] = weakref.WeakKeyDictionary()


def mark_divided(loss: torch.Tensor) -> torch.Tensor:
    """Remembers of a loss, in its graph, that it is this replica's part of a sum."""
    node: Any = None if torch.compiler.is_compiling() else loss.grad_fn
    if node is not None:
        node.metadata[_MARK] = True
        if not _marked:
            _marked.append(True)
    return loss


def note_pass(roots: Sequence[Any], gradients: Sequence[torch.Tensor], replica: Replica) -> None:
    """Looks at a ``backward()`` of a replica.

    Args:
        roots: the losses.
        gradients: what ``backward`` begins with, of each.
        replica: the replica's context.
    """
    if not _marked or replica.num_replicas_in_sync == 1 or replica.replica_id:
        return
    store = replica.strategy.parameter_store
    passes = _found.setdefault(store, [])
    if len(passes) >= _PASSES or not any(map(_is_part, roots)):
        return
    if any(bool((gradient != 1).any()) for gradient in gradients if gradient is not None):  # scaled
        return
    averaged = {id(record.tensor) for record in store.records() if _is_averaged(record)}
    passes.append({id(leaf) for leaf in leaves_of(roots)} & averaged if averaged else set())


def say_divided_twice(optimizer: object, records: Sequence[Record]) -> None:
    """Warns, once, of a step with gradients of such a loss that were averaged.

    Args:
        optimizer: an optimizer of torch.
        records: its parameters, of one strategy.
    """
    store = records[0].store
    passes = _found.get(store, ())
    if not any(passes) or not any(id(record.tensor) in reached for record in records for reached in passes):
        return
    replicas = store.strategy.num_replicas_in_sync if store.strategy is not None else 1
    warn_once(
        f"a loss divided twice {id(store)}",
        "compute_average_loss divides by the global batch, so that the replicas' losses add up; but for "
        f"{type(optimizer).__name__} of torch.optim backward() takes the mean over the {replicas} replicas, so the "
        f"gradients are 1/{replicas} of those of one device, unless the program scales them itself. Use the mean "
        'loss of the replica\'s share, or call strategy.set_gradient_policy(scale="SUM") before the '
        'first step (README.md, "SUM or MEAN").',
    )


def _is_averaged(record: Record) -> bool:
    policy = record.policy
    return policy is not None and policy.reduce_at == "backward" and policy.scale is ReduceOp.MEAN


def _is_part(root: Any) -> bool:
    """Whether a loss, or a term of it, is marked; one that was multiplied since is not known."""
    nodes: list[Any] = [root.grad_fn] if isinstance(root, torch.Tensor) else []
    seen: set[Any] = set()  # terms may be shared
    while nodes and len(seen) < _MOST_TERMS:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _MARK in node.metadata:
            return True
        if type(node).__name__ in _SUMS:
            nodes += [before for before, _ in node.next_functions]
    return False
