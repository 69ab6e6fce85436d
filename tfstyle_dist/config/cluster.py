"""``tf.config.experimental_connect_to_cluster``: a name that ported programs call."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.cluster_resolver import ClusterResolver, ClusterSpec


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterSpec | ClusterResolver,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: Any = None,
) -> None:
    """Checks the cluster's description; the strategy that is made from it connects.

    Args:
        cluster_spec_or_resolver: the cluster.
        job_name: accepted for TF's signature; so are the others.
        task_index: likewise.
        protocol: likewise.
        make_master_device_default: likewise.
        cluster_device_filters: likewise.

    Raises:
        ValueError: neither a ``ClusterSpec`` nor a ``ClusterResolver``.

    Example:
        >>> experimental_connect_to_cluster(ClusterSpec({"worker": ["host0:2222"]}))

    Source: ``tf.config.experimental_connect_to_cluster``.
    """
    if not isinstance(cluster_spec_or_resolver, ClusterSpec | ClusterResolver):
        raise ValueError(
            "`cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`, got "
            f"{type(cluster_spec_or_resolver).__name__}; write e.g. ClusterSpec({{'worker': ['host0:2222']}})."
        )
    if isinstance(cluster_spec_or_resolver, ClusterResolver):
        cluster_spec_or_resolver.cluster_spec()  # says at once what is wrong with its description
