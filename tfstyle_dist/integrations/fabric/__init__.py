"""Strategies under Lightning Fabric; needs the extra ``lightning``. Importing it registers ``tfd_mirrored``."""

from tfstyle_dist.integrations.fabric.fabric_strategy import TfdFabricStrategy

__all__ = ["TfdFabricStrategy"]
