"""Losses of ``compile`` that are not a mean over the examples: of all replicas together they are what one device gives.

A step's gradients, and its loss, are averaged over the replicas by their examples. That is right for a mean over the
examples. A sum, a mean over what a mask leaves and one over weights are multiplied by what makes it right for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.integrations.keras.backend import keras, loss_module
from tfstyle_dist.integrations.keras.share import CURRENT
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import current_replica


def install() -> None:
    """Lets the losses that ``compute_loss`` of Keras adds up know what all replicas have."""
    wrap(keras.Model, "compute_loss", _compute_loss)
    wrap(loss_module, "reduce_weighted_values", _reduce)


def _compute_loss(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    before, CURRENT.losses = CURRENT.losses, True
    try:
        return original(model, *args, **kwargs)
    finally:
        CURRENT.losses = before


def _reduce(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    count, replica = CURRENT.count, current_replica()
    if not CURRENT.losses or count is None or replica is None:
        return original(values, sample_weight, mask, reduction, dtype)
    if mask is not None and isinstance(sample_weight, torch.Tensor):
        sample_weight = sample_weight.clone()  # Keras multiplies it by the mask in place: the replicas' are one tensor
    value = original(values, sample_weight, mask, reduction, dtype)
    if not keras.ops.ndim(values):
        return value  # Keras divides what is one number by nothing
    if reduction == "sum":
        own = torch.ones(())
    else:
        divisor = _divisor(sample_weight, mask, reduction)
        if divisor is None:
            return value
        own = divisor if count else torch.zeros(())
    own = own.detach().to(value.device, torch.float64)
    examples, whole = replica.all_reduce(ReduceOp.SUM, torch.stack([own.new_tensor(float(count)), own]))
    if reduction == "sum":
        whole = own  # nothing is divided by
    factor = examples * own / (max(count, 1) * whole)
    return value * torch.where(whole == 0, 0.0, factor).to(value.dtype)


def _divisor(sample_weight: Any, mask: Any, reduction: str | None) -> torch.Tensor | None:
    """What Keras divides the sum of a replica's values by; ``None`` where that is the number of its values."""
    ops: Any = keras.ops
    if reduction in ("mean", "sum_over_batch_size"):
        weights = [] if mask is None else [mask]
    elif reduction == "mean_with_sample_weight":
        weights = [weight for weight in (sample_weight, mask) if weight is not None]
    else:
        weights = []
    if not weights:
        return None
    weights = [ops.cast(ops.convert_to_tensor(weight), "float32") for weight in weights]
    if len(weights) == 2:
        weights = loss_module.squeeze_or_expand_to_same_rank(*weights)
    total: torch.Tensor = ops.sum(math.prod(weights))
    return total
