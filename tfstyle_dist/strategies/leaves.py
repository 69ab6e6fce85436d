"""The leaves of what is reduced and gathered: which have a tensor, and what each replica of this worker has."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops.rows import dense_rows
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.values import IndexedSlices, PerReplica
from tfstyle_dist.variables import Variable
from tfstyle_dist.variables.replicated import Replicated


def as_reducible(leaf: Any, what: str) -> torch.Tensor:
    """The tensor of one leaf.

    Raises:
        ValueError: the leaf is no tensor.
        InvalidArgumentError: its layout is neither dense nor sparse COO, it is divided over devices, or rows do not say
            of how many they are.
    """
    if isinstance(leaf, Replicated):
        return leaf._tfstyle_value()
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.as_tensor(leaf)
    if isinstance(leaf, IndexedSlices):
        return dense_rows(leaf, what)
    if mesh.is_divided(leaf):
        raise InvalidArgumentError(
            f"{what}: a tensor of shape {tuple(leaf.shape)} that is divided over several devices cannot be combined "
            "over replicas. Write model_parallel.whole(tensor), on all processes of the replica, for its full values."
        )
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo):
            raise InvalidArgumentError(
                f"{what}: a {'nested tensor' if leaf.is_nested else f'tensor of layout {leaf.layout}'} cannot be "
                "combined over replicas: make it dense, e.g. with to_dense() or torch.nested.to_padded_tensor, or "
                "sparse COO."
            )
        return leaf
    raise ValueError(
        f"{what}: a leaf of type {type(leaf).__name__} ({leaf!r}) cannot be reduced over replicas; None values and "
        "Python numbers have no per-replica value. Pass torch.tensor(...)."
    )


def of_result(leaf: Any, what: str) -> torch.Tensor:
    """The tensor of what a replica returned from ``run``, which may be one of Python's numbers, too.

    Raises:
        ValueError: neither a tensor nor a number, or a number that does not fit into a tensor.
        InvalidArgumentError: a layout that cannot be combined.
    """
    if not isinstance(leaf, numbers.Number) or isinstance(leaf, np.generic):
        return as_reducible(leaf, what)
    try:
        return torch.as_tensor(leaf)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{leaf!r} ({type(leaf).__name__}) does not fit into a tensor, by which replicas tell each other their "
            "values. Give a smaller whole number, or a float."
        ) from error


def of_one_replica(value: Any) -> Any:
    """What one replica gets of a value that is reduced over itself alone.

    Of a variable it is what that holds now, as TensorFlow gives a tensor, which a later ``assign`` does not change.
    """
    if not any(isinstance(leaf, Variable) for leaf in nest.leaves(value)):
        return value
    return nest.map_structure(lambda leaf: leaf.clone() if isinstance(leaf, Variable) else leaf, value)


def refuse_numbers(parts: Sequence[Any]) -> None:
    """Raises ValueError for numbers of Python to be summed: ``run`` gives one of all its replicas as that number.

    So a sum would be refused in the steps alone, and on the workers alone, in which they happen to be the same object.
    """
    if len(parts) > 1 and any(isinstance(part, numbers.Number) and not isinstance(part, np.generic) for part in parts):
        raise ValueError(
            f"The numbers {', '.join(map(repr, parts))} of the replicas cannot be reduced with SUM: where all return "
            "the same object, strategy.run gives that number, which is not told from a constant. Return a tensor, "
            "torch.tensor(number), from strategy.run."
        )


def parts_on_this_worker(worker: Worker, value: Any, same_everywhere: bool) -> list[Any] | None:
    """What each local replica has of a value that no ``PerReplica`` holds; ``None`` if all workers have the same one.

    With one replica on each worker, ``run`` gives what the replica returned as it is, also Python's numbers.

    Args:
        worker: says who takes part.
        value: any leaf.
        same_everywhere: whether a value that all replicas of this worker share counts as one that each of them has.
    """
    count = worker.num_local_replicas
    kinds = (torch.Tensor, IndexedSlices, np.ndarray, np.generic, numbers.Number)
    if worker.group.size == 1 or not isinstance(value, kinds) or (count > 1 and not same_everywhere):
        return None
    return [value] * count


def per_replica_tensors(value: Any, count: int, what: str = "reduce") -> list[torch.Tensor]:
    """One tensor for each local replica; a plain tensor or number counts as identical on all."""
    if isinstance(value, PerReplica):
        return [of_result(v, what) for v in value.values]
    if isinstance(value, Variable) and len(value._tfstyle_record.components) == count:
        return [c.detach() for c in value._tfstyle_record.components]
    return [of_result(value, what)] * count


def has_rows(leaf: Any) -> bool:
    """Whether a leaf is ``IndexedSlices``, or those of a replica."""
    return isinstance(leaf, IndexedSlices) or (
        isinstance(leaf, PerReplica) and any(isinstance(v, IndexedSlices) for v in leaf.values)
    )


def refuse_rows(leaf: Any, what: str) -> NoReturn:
    """Raises NotImplementedError for ``IndexedSlices``, which have no axis along which they could be concatenated."""
    raise NotImplementedError(
        f"{what} does not support IndexedSlices, got {leaf!r}; call it for their values and for their indices, or add "
        "up the rows with reduce or all_reduce."
    )


def check_axis(tensor: torch.Tensor, axis: Any) -> None:
    """Raises unless ``axis`` is a dimension of the tensor."""
    if not isinstance(axis, numbers.Integral) or isinstance(axis, bool):
        raise ValueError(f"axis must be a whole number from 0 on, got {axis!r}; write e.g. axis=0.")
    if not 0 <= int(axis) < tensor.dim():
        dimensions = f"use a dimension from 0 to {tensor.dim() - 1}; negative axes are not accepted"
        raise InvalidArgumentError(
            f"axis {axis} does not fit a value of rank {tensor.dim()} and shape {tuple(tensor.shape)}: "
            + (
                f"{dimensions}."
                if tensor.dim()
                else "a scalar needs value.reshape(1) first, a number torch.tensor([x])."
            )
        )
