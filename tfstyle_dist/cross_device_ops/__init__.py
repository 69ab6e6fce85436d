"""Layer 3: how values of several replicas become one."""

from tfstyle_dist.cross_device_ops.all_reduce import HierarchicalCopyAllReduce, NcclAllReduce
from tfstyle_dist.cross_device_ops.base import CrossDeviceOps
from tfstyle_dist.cross_device_ops.reduction_to_one import ReductionToOneDevice

__all__ = ["CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"]
