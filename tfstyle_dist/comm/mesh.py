"""Tensors that are divided over workers: DTensor and DeviceMesh of torch, imported when they are first needed."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core import torch_internals


def is_divided(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def device_mesh(group: WorkerGroup, device_type: str, name: str) -> Any:
    """A one-dimensional mesh of the group's workers.

    Args:
        group: the workers.
        device_type: ``"cpu"`` or ``"cuda"``.
        name: of the dimension.

    Raises:
        ValueError: the group is not one of torch's.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from tfstyle_dist.comm.torch_group import TorchGroup

    if not isinstance(group, TorchGroup):
        raise ValueError(
            f"A mesh needs several worker processes, but {type(group).__name__} has {group.size}. Start the program "
            "with torchrun."
        )
    return DeviceMesh.from_group(group.process_group, device_type, mesh_dim_names=(name,))


def divide(tensor: torch.Tensor, mesh: Any, axis: int | None) -> torch.Tensor:
    """A DTensor of the first worker's values, cut along ``axis``; ``None``: whole on every worker. Collective."""
    from torch.distributed.tensor import distribute_tensor

    placement = _placement(axis)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(distribute_tensor(tensor.detach(), mesh, [placement]), tensor.requires_grad)
    return distribute_tensor(tensor, mesh, [placement])


def divide_computed(tensor: Any, mesh: Any, axis: int | None, group: WorkerGroup, source: int) -> torch.Tensor:
    """One worker's values as ``divide`` lays them out; gradients go back through it. Collective.

    Args:
        tensor: what the step has computed, or a parameter that it uses.
        mesh: the workers of ``group``.
        axis: where to cut; ``None``: whole on every worker.
        group: the workers that share a replica.
        source: whose values count; of a DTensor all have the same ones.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not is_divided(tensor):
        values = _ValuesOf.apply(tensor, group, source)  # type: ignore[no-untyped-call]
        tensor = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    return tensor.redistribute(placements=[_placement(axis)])  # type: ignore[no-any-return]


def values_of(tensor: torch.Tensor, group: WorkerGroup, source: int, name: str) -> torch.Tensor:
    """A copy of one worker's values on all of a group. Collective."""
    flat = tensor.detach().clone().reshape(-1)
    group.broadcast(flat, source, name)
    return flat.view(tensor.shape)


class _ValuesOf(torch.autograd.Function):
    """One worker's values on all of a group.

    All of them go on to compute the same loss, so that to each comes the whole gradient, and each has its own copy, or
    its part, of the layers before: nothing is to be summed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: WorkerGroup, source: int) -> torch.Tensor:
        return values_of(tensor, group, source, "values of a logical device")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None, None


def _placement(axis: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if axis is None else Shard(axis)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full values of a DTensor, on every worker of its mesh; collective over them. Other tensors come back."""
    return tensor.full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def part_of(tensor: Any) -> torch.Tensor:
    """This worker's part of a DTensor; shares its memory, and knows nothing of gradients."""
    return torch_internals.local_part(tensor)


def from_part(part: torch.Tensor, like: Any) -> torch.Tensor:
    """The DTensor that is divided as ``like`` and has this part here; shares the part's memory."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def divided_as(tensor: Any, like: Any) -> Any:
    """``tensor``, divided as ``like``: a gradient comes as the last operation left it. Collective where it differs."""
    if tensor.placements == like.placements:
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=like.placements)


def write_whole(tensor: Any, value: torch.Tensor) -> None:
    """Puts this worker's part of full values into a DTensor; nothing is sent."""
    with torch.no_grad():
        part_of(tensor).copy_(part_of(divided_like(value, tensor)))


def is_on(tensor: Any, mesh: Any) -> bool:
    """Whether a DTensor is divided over ``mesh``."""
    return bool(tensor.device_mesh == mesh)


def num_workers(tensor: Any) -> int:
    """Over how many workers a DTensor is laid out."""
    return int(tensor.device_mesh.size())


def plain_is_whole() -> Any:
    """A context manager in which a plain tensor may meet DTensors: it counts as whole on every worker."""
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def divided_like(value: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor of full values that are the same on every worker, divided as ``like``; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        moved = value.detach().to(like.device)
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def averages_uneven_parts(mesh: Any) -> bool:
    """Whether torch's mean of a DTensor weighs parts by their size; torch 2.9's does not. Collective over the mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    numbers = torch.arange(mesh.size() + 1.0, device=mesh.device_type)
    divided = distribute_tensor(numbers, mesh, [Shard(0)])
    return bool(whole(divided.mean()) == numbers.mean())
