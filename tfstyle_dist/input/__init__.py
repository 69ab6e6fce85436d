"""Layer 3: distributed datasets."""

from tfstyle_dist.core.enums import InputReplicationMode
from tfstyle_dist.input.arrays import ArrayDataset
from tfstyle_dist.input.dataset import DistributedDataset, distribute, distribute_from_function
from tfstyle_dist.input.files import FileDataset, ListsFiles, read_lines, read_tar
from tfstyle_dist.input.iterator import DistributedIterator, shares_under_way
from tfstyle_dist.input.optional import Optional
from tfstyle_dist.input.options import AutoShardPolicy, DistributeOptions, InputContext, InputOptions
from tfstyle_dist.input.report import ShardReport, WorkerShare
from tfstyle_dist.input.request import Request
from tfstyle_dist.input.split import TensorSpec

__all__ = [
    "ArrayDataset",
    "AutoShardPolicy",
    "DistributeOptions",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "ListsFiles",
    "Optional",
    "Request",
    "ShardReport",
    "TensorSpec",
    "WorkerShare",
    "distribute",
    "distribute_from_function",
    "read_lines",
    "read_tar",
    "shares_under_way",
]
