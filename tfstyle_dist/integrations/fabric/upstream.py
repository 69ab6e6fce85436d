"""The only module that imports Lightning. All names are public ones of Fabric.

Fabric is ``lightning.fabric``, and ``lightning_fabric`` with other classes of the same names: what the program has
loaded is taken, else what is installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any


def _is_the_other() -> bool:
    """Whether ``lightning_fabric`` is meant."""
    if "lightning.fabric" in sys.modules or "lightning_fabric" in sys.modules:
        return "lightning.fabric" not in sys.modules
    return find_spec("lightning") is None


try:
    if _is_the_other():
        from lightning_fabric.plugins.environments import ClusterEnvironment
        from lightning_fabric.plugins.precision import DeepSpeedPrecision, FSDPPrecision, XLAPrecision
        from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    else:
        from lightning.fabric.plugins.environments import ClusterEnvironment
        from lightning.fabric.plugins.precision import DeepSpeedPrecision, FSDPPrecision, XLAPrecision
        from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("lightning", "lightning_fabric"):
        raise
    raise ModuleNotFoundError(
        "tfstyle_dist.integrations.fabric needs Lightning Fabric, which is not installed. Write pip install "
        "lightning (the extra 'lightning' of tfstyle_dist).",
        name="lightning",
    ) from missing

ELSEWHERE: tuple[Any, ...] = (DeepSpeedPrecision, FSDPPrecision, XLAPrecision)
"""Precision plugins of strategies that divide the work in another way."""

__all__ = ["ELSEWHERE", "STRATEGY_REGISTRY", "ClusterEnvironment", "DDPStrategy"]
