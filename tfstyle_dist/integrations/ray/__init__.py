"""Strategies on Ray: Ray places and restarts the processes, this package trains; needs the extra ``ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfstyle_dist.core.lazy import loader
from tfstyle_dist.integrations.ray import upstream as upstream  # says what to install, if Ray is missing

if TYPE_CHECKING:
    from tfstyle_dist.integrations.ray.cluster import RayCluster, parameter_server_cluster
    from tfstyle_dist.integrations.ray.train import TfdConfig

__all__ = ["RayCluster", "TfdConfig", "parameter_server_cluster"]

# Ray's processes import this package for a part of it.
__getattr__ = loader(__name__, {"RayCluster": "cluster", "parameter_server_cluster": "cluster", "TfdConfig": "train"})
