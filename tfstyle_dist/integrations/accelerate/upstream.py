"""The only module that imports accelerate. All names are public ones of accelerate."""

from __future__ import annotations

from typing import Any

try:
    from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.utils import DistributedDataParallelKwargs, recursively_apply
except ModuleNotFoundError as missing:
    if missing.name != "accelerate":
        raise
    raise ModuleNotFoundError(
        "tfstyle_dist.integrations.accelerate needs the package accelerate, which is not installed. Write "
        "pip install accelerate (the extra 'accelerate' of tfstyle_dist).",
        name="accelerate",
    ) from missing

__all__ = [
    "Accelerator",
    "BatchSamplerShard",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "map_tensors",
]


def map_tensors(function: Any, data: Any, *, strict: bool = False) -> Any:
    """Applies ``function`` to every tensor of a nest of lists, tuples and mappings.

    Args:
        function: takes and returns a tensor.
        data: the nest.
        strict: whether anything but a tensor in it is a TypeError.
    """
    return recursively_apply(function, data, error_on_other_type=strict)
