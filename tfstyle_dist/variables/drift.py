"""Says it when the replicas of a process go on with different weights: a step wrote what is its replica's own."""

from __future__ import annotations

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.contents import ReplicaContents

_RELATIVE, _ABSOLUTE = 1e-4, 1e-6  # what other devices or kernels may round differently
_KINDS = (torch.Tensor, torch.nn.Parameter)  # what a class of its own compares is its affair


def say_drift(contents: ReplicaContents, runs: int) -> None:
    """Warns, once for each parameter, of those that are trained and have other values on another replica.

    It looks after runs 1, 2, 4, 8, ..., so that it costs nothing in the end.

    Args:
        contents: of the replicas, between two runs.
        runs: how many there were.
    """
    if contents.may_differ or runs & (runs - 1):
        return
    others = [replica for replica in range(contents.count) if replica != contents.first]
    for parameter in contents.parameters():
        plain = type(parameter) in _KINDS and parameter.layout is torch.strided and not parameter.is_meta
        if plain and parameter.requires_grad:
            different = next((r for r in others if _differ(parameter, contents.inside(parameter, r))), None)
            if different is not None:
                _warn(parameter, different, contents, runs)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    other = other.to(one.device)
    return not torch.equal(one, other) and not torch.allclose(one, other, _RELATIVE, _ABSOLUTE, equal_nan=True)


def _warn(parameter: torch.Tensor, replica: int, contents: ReplicaContents, runs: int) -> None:
    held = (
        f"{name!r} of {type(module).__name__}"
        for module, _ in contents.objects()
        if isinstance(module, torch.nn.Module)
        for name, own in module.named_parameters(recurse=False)
        if own is parameter
    )
    which = next(held, f"of shape {tuple(parameter.shape)}")
    warn_once(
        f"drift {id(parameter)}",
        f"After run {runs} replica {replica} has other values of the parameter {which} than replica 0: the step "
        "function (or an optimizer in it) wrote what is each replica's own, such as random numbers, statistics of its "
        "share of the batch, or results of torch.autograd.grad. The replicas train different weights from now on. Do "
        "such writes before strategy.run (call the model once on a batch, if its first call sets parameters), or make "
        'the values one first: get_replica_context().all_reduce("MEAN", values). See docs/replicas.md.',
    )
