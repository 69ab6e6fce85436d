"""``ReductionToOneDevice``: bring everything to one device, sum there, send copies back."""

from __future__ import annotations

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
