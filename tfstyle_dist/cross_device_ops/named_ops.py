"""The cross-device operations that TensorFlow names: a sum on one device, and all-reduces in an order of addition."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

import torch

from tfstyle_dist.core import devices
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.cross_device_ops.base import CrossDeviceOps
from tfstyle_dist.cross_device_ops.collective import OwnSum


class ReductionToOneDevice(CrossDeviceOps):
    """Sums all values on one device (``tf.distribute.ReductionToOneDevice``).

    Args:
        reduce_to_device: device string of the place to sum; default: the first replica's device.
        accumulation_fn: takes the list of tensors and returns their sum; default: ``ops.aggregate``.
        aggregation_method: an ``AggregationMethod``: the order in which values and gradients are added, within this
            process and between workers.

    Raises:
        TypeError: ``accumulation_fn`` cannot be called.
        ValueError: ``reduce_to_device`` is no device, or an unknown method.

    Example:
        >>> MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ReductionToOneDevice())
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
        *,
        aggregation_method: int | None = None,
    ) -> None:
        self.aggregation_method = AggregationMethod.validate(aggregation_method)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                f"accumulation_fn must be a function that takes a list of tensors and returns their sum, got "
                f"{accumulation_fn!r}; write e.g. accumulation_fn=lambda tensors: torch.stack(tensors).sum(0)."
            )
        self.reduce_to_device = None if reduce_to_device is None else devices.parse(reduce_to_device)
        self.accumulation_fn = accumulation_fn

    @property
    def own_sum(self) -> OwnSum | None:
        overridden = type(self).sum_values is not ReductionToOneDevice.sum_values
        return self._checked_sum if overridden or self.accumulation_fn is not None else None

    def sum_values(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.reduce_to_device is not None:
            values = [v.to(self.reduce_to_device.torch_device) for v in values]
        if self.accumulation_fn is not None:
            return self.accumulation_fn([v.detach() for v in values])
        return super().sum_values(values)


class _PackedAllReduce(CrossDeviceOps):
    def __init__(self, num_packs: int = 1) -> None:
        if not isinstance(num_packs, numbers.Integral):
            raise TypeError(f"num_packs must be a whole number, got {num_packs!r}; write e.g. num_packs=1.")
        if num_packs < 0:
            raise ValueError(f"num_packs must be >= 0, got {num_packs}; 0 packs nothing.")
        self.num_packs = num_packs


class NcclAllReduce(_PackedAllReduce):
    """The all-reduce that strategies use between GPUs anyway (``tf.distribute.NcclAllReduce``).

    It changes nothing: its sums are those of a strategy that is given no op, bit for bit. Between processes that have
    GPUs NCCL makes them, unless ``CommunicationOptions(implementation=...)`` says something else. Between GPUs of one
    process NCCL is not called: each sums a slice of every bucket, and the slices are copied. On the CPU it sums like
    every other op.

    Args:
        num_packs: checked as in TensorFlow, without effect: ``CommunicationOptions(bytes_per_pack=...)`` says how much
            of the gradients travels at once.

    Raises:
        TypeError: ``num_packs`` is no whole number.
        ValueError: ``num_packs`` is negative.

    Example:
        >>> MirroredStrategy(["cuda:0", "cuda:1"], cross_device_ops=NcclAllReduce())
    """


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Adds in the order of a tree over the replicas (``tf.distribute.HierarchicalCopyAllReduce``).

    That is ``ReductionToOneDevice(aggregation_method=AggregationMethod.TREE)``. What travels between the devices takes
    the same way as without it.

    Args:
        num_packs: checked as in TensorFlow, without effect: ``CommunicationOptions(bytes_per_pack=...)`` says how much
            of the gradients travels at once.

    Raises:
        TypeError: ``num_packs`` is no whole number.
        ValueError: ``num_packs`` is negative.

    Example:
        >>> MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    """

    aggregation_method = AggregationMethod.EXPERIMENTAL_TREE
