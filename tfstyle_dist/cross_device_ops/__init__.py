"""Layer 3: how values of several replicas become one."""

from tfstyle_dist.cross_device_ops.base import CrossDeviceOps
from tfstyle_dist.cross_device_ops.named_ops import HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice

__all__ = ["CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"]
