"""Layer 1, ``tf.distribute.cluster_resolver``: which tasks there are, where, and which one this process is."""

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.cluster_resolver.gce import GCEClusterResolver
from tfstyle_dist.cluster_resolver.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from tfstyle_dist.cluster_resolver.simple import SimpleClusterResolver
from tfstyle_dist.cluster_resolver.slurm import SlurmClusterResolver
from tfstyle_dist.cluster_resolver.tf_config import TFConfigClusterResolver
from tfstyle_dist.cluster_resolver.torchrun import TorchrunClusterResolver
from tfstyle_dist.cluster_resolver.tpu import TPUClusterResolver
from tfstyle_dist.cluster_resolver.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
]
