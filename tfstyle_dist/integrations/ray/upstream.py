"""The only module that imports Ray. All names are public ones of Ray, or those it gives to writers of backends."""

from __future__ import annotations

from typing import Any

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util import get_node_ip_address, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as missing:
    if missing.name != "ray":
        raise
    raise ModuleNotFoundError(
        "tfstyle_dist.integrations.ray needs Ray, which is not installed. Write pip install 'ray[train]' (the extra "
        "'ray' of tfstyle_dist).",
        name="ray",
    ) from missing

__all__ = [
    "GetTimeoutError",
    "PlacementGroupSchedulingStrategy",
    "RayError",
    "get_node_ip_address",
    "placement_group",
    "ray",
    "ray_train",
    "remove_placement_group",
]


def ray_train() -> tuple[Any, Any, Any]:
    """``ray.train``, ``ray.train.backend.Backend`` and ``ray.train.torch.TorchConfig``.

    Ray Train brings pandas and pyarrow, which the tasks of a parameter server cluster do not wait for.

    Raises:
        ModuleNotFoundError: one of the packages that it needs is missing.
    """
    try:
        import ray.train
        from ray.train.backend import Backend
        from ray.train.torch import TorchConfig
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"TfdConfig needs Ray Train, and {missing.name} is not installed. Write pip install 'ray[train]' (the "
            "extra 'ray' of tfstyle_dist).",
            name=missing.name,
        ) from missing
    return ray.train, Backend, TorchConfig
