"""Loss helpers of ``tf.nn`` that know the number of replicas."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.lazy import loader
from tfstyle_dist.gradients.divided_losses import mark_divided
from tfstyle_dist.strategies.contexts import get_strategy, has_strategy, in_cross_replica_context

__all__ = ["compute_average_loss", "scale_regularization_loss"]

__getattr__ = loader(__name__, {})  # says what to write for the layers and losses of ``tf.nn``


def compute_average_loss(
    per_example_loss: torch.Tensor | Sequence[torch.Tensor],
    sample_weight: torch.Tensor | Sequence[Any] | float | None = None,
    global_batch_size: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """This replica's part of the average loss: the SUM over the replicas is the average over the global batch.

    Args:
        per_example_loss: losses of this replica's examples, at least one dimension, first the batch; a list of
            tensors counts as one.
        sample_weight: a weight for each example, or one for all; with an axis less or more (of 1) than the losses as in
            TensorFlow.
        global_batch_size: examples of all replicas together; default: this replica's number times the number of
            replicas, which is right only for even batches.

    Returns:
        A scalar: ``sum(per_example_loss * sample_weight) / global_batch_size``; 0 when that size is 0.

    Raises:
        ValueError: ``per_example_loss`` is a scalar, or ``sample_weight`` does not fit it.
        TypeError: ``global_batch_size`` is no whole number, or losses or weights are no numbers.
        InvalidArgumentError: ``global_batch_size`` is negative.
        RuntimeError: no ``global_batch_size`` in cross-replica context.

    Example:
        >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
        tensor(1.)

    Source: ``tf.nn.compute_average_loss``.
    """
    loss = _tensor(per_example_loss, "per_example_loss")
    if loss.dim() == 0:
        raise ValueError(
            "Invalid value passed for `per_example_loss`: a scalar (rank 0). Give one loss per example, e.g. "
            "cross_entropy(..., reduction='none')."
        )
    weighted = loss if sample_weight is None else _weighted(loss, _tensor(sample_weight, "sample_weight"))
    if global_batch_size is None:
        if has_strategy() and in_cross_replica_context():
            raise RuntimeError(
                "compute_average_loss without global_batch_size must be called in replica context: the number of "
                "examples of the other replicas is not known in cross-replica context. Pass global_batch_size."
            )
        size = loss.shape[0] * get_strategy().num_replicas_in_sync
    else:
        size = _whole(global_batch_size)
    if size < 0:
        raise InvalidArgumentError(
            f"global_batch_size must be non-negative, got {size}; give the number of examples of all replicas together."
        )
    total = weighted.sum()
    if size:
        average = total / size
        return average if size == loss.shape[0] else mark_divided(average)  # else the mean of this replica's share
    mean = total / 1  # in the type of a mean; zero whatever the losses are, infinite ones too
    return torch.where(torch.zeros_like(mean, dtype=torch.bool), mean, torch.zeros_like(mean))


def _tensor(value: Any, name: str) -> torch.Tensor:
    """A tensor with the graph of what it is made of: of tensors in a list, too."""
    try:
        if isinstance(value, list | tuple) and any(isinstance(entry, torch.Tensor) for entry in value):
            return torch.stack([torch.as_tensor(entry) for entry in value])
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"`{name}` must be a tensor, numbers, or a list of such of one shape, got {value!r} ({error}); give e.g. "
            "what cross_entropy(..., reduction='none') returns."
        ) from error


def _weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Their product; where one has an axis more, as TensorFlow's ``squeeze_or_expand_dimensions`` makes them fit."""
    if weight.dim() == loss.dim() + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    elif weight.dim() > 0 and loss.dim() == weight.dim() + 1:
        weight = weight.unsqueeze(-1)
    computes = loss.is_floating_point() or loss.is_complex()
    if not _fits(weight.shape, loss.shape):
        raise ValueError(
            f"sample_weight of shape {tuple(weight.shape)} does not fit per_example_loss of shape {tuple(loss.shape)}. "
            "Give one weight for all, one for each example, or one for each loss."
        )
    product = loss * weight.to(loss.device, loss.dtype if computes else torch.float32)
    return product if computes else product.to(loss.dtype)


def _fits(weight: torch.Size, loss: torch.Size) -> bool:
    """Whether a product of weights and losses has the shape of the losses."""
    sizes = zip(reversed(weight), reversed(loss), strict=False)
    return len(weight) <= len(loss) and all(one == 1 or one == other for one, other in sizes)


def _whole(size: int | torch.Tensor) -> int:
    if isinstance(size, torch.Tensor):
        if size.dim() > 0:
            raise ValueError(f"`global_batch_size` must be a scalar, got a tensor of shape {tuple(size.shape)}.")
        if size.is_floating_point() or size.is_complex():
            raise TypeError(f"`global_batch_size` must be an integer, got a tensor of {size.dtype}.")
        return int(size)
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"`global_batch_size` must be an integer, got {type(size).__name__}: {size!r}.")
    return int(size)


def scale_regularization_loss(regularization_loss: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``regularization_loss`` divided by the number of replicas, because the replicas' losses are summed.

    Args:
        regularization_loss: a tensor of any shape, or a list of such, the same on all replicas.

    Returns:
        A scalar tensor.

    Raises:
        RuntimeError: called in cross-replica context.
        TypeError: ``regularization_loss`` is none.

    Source: ``tf.nn.scale_regularization_loss``.

    Example:
        >>> loss = compute_average_loss(losses, global_batch_size=64) + scale_regularization_loss(penalty)
    """
    if has_strategy() and in_cross_replica_context():
        raise RuntimeError(
            "You are calling scale_regularization_loss in cross-replica context, while it was expected to be called in "
            "replica context (inside strategy.run)."
        )
    if isinstance(regularization_loss, list | tuple) and regularization_loss:
        whole = torch.stack([_tensor(loss, "regularization_loss").sum() for loss in regularization_loss]).sum()
    else:
        whole = _tensor(regularization_loss, "regularization_loss").sum()
    return whole / get_strategy().num_replicas_in_sync
