"""``tf.distribute.OneDeviceStrategy``."""

from __future__ import annotations

import torch

from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import devices as device_names, env
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.variables import Variable
from tfstyle_dist.variables.creation import VariableSpec, build_single


class OneDeviceStrategy(Strategy):
    """Runs everything on one device, to try distributed code without distributing.

    Source: ``tf.distribute.OneDeviceStrategy``.

    Args:
        device: e.g. ``"cpu:0"``, ``"/gpu:1"``.

    Raises:
        ValueError: no such device here; the message says what to write.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:0")
        >>> strategy.run(lambda x: x + 1, args=(1,))
        2
    """

    distributes = False

    def __init__(self, device: str | torch.device) -> None:
        place = device_names.parse(device)
        device_names.check_present(place)
        super().__init__(StrategyExtended(Worker((place,), SingleGroup(), env.timeout())))

    def create_variable(self, spec: VariableSpec) -> Variable:
        """An ordinary variable on the device."""
        return build_single(Variable, spec, self.parameter_store)
