"""Tensors that are divided over workers: DTensor and DeviceMesh of torch, imported when they are first needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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


class _ValuesOf(torch.autograd.Function):
    """One worker's values on all of a group.

    All of them go on to compute the same loss, so that to each comes the whole gradient, and each has its own copy, or
    its part, of the layers before: nothing is to be summed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: WorkerGroup, source: int) -> torch.Tensor:
        flat = tensor.detach().clone().reshape(-1)
        group.broadcast(flat, source, "values of a logical device")
        return flat.view(tensor.shape)

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


def divide_layers(module: torch.nn.Module, mesh: Any, plan: Mapping[str, str]) -> None:
    """Divides layers in place with torch's tensor parallelism.

    Args:
        module: the model.
        mesh: the workers that share it.
        plan: the name of a layer, with ``*`` for any part of a name, and ``"column"``, ``"row"`` or ``"output"``.

    Raises:
        ValueError: no layer has such a name, it is no ``Linear`` or ``Embedding``, or another division is named.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    layers = planned_layers(module, plan)
    ties = _ties(module, layers, plan)
    for name, layer in layers:
        parallelize_module(layer, mesh, _style(name, layer, plan, mesh.size()))
    for (first, name), *others in ties:  # each layer has got a parameter of its own
        for owner, other in others:
            owner.register_parameter(other, first.get_parameter(name))


def _ties(
    module: torch.nn.Module, layers: list[tuple[str, torch.nn.Module]], plan: Mapping[str, str]
) -> list[list[tuple[torch.nn.Module, str]]]:
    """The places of each parameter that several modules have and that is divided.

    Raises:
        ValueError: one of them would have it divided in another way, or whole.
    """
    axes = {
        (layer, name): axis
        for pattern, layer in layers
        for name, axis in divided_axes(pattern, layer, plan[pattern]).items()
    }
    places: dict[int, list[tuple[str, torch.nn.Module, str]]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((f"{prefix}.{name}" if prefix else name, owner, name))
    tied = [some for some in places.values() if len(some) > 1 and any((o, n) in axes for _, o, n in some)]
    for some in tied:
        ways = [axes.get((owner, name)) for _, owner, name in some]
        if len(set(ways)) > 1:
            how = ", ".join(
                f"{path} {'whole' if way is None else f'cut along dimension {way}'}"
                for (path, _, _), way in zip(some, ways, strict=True)
            )
            raise ValueError(
                f"One parameter is in several layers, which would have it in different ways: {how}. Name all of these "
                "layers in the plan and divide them along the same dimension ('row' of an Embedding and 'column' or "
                "'output' of a Linear), or none of them."
            )
    return [[(owner, name) for _, owner, name in some] for some in tied]


def planned_layers(module: torch.nn.Module, plan: Mapping[str, str]) -> list[tuple[str, torch.nn.Module]]:
    """The entry of the plan for each layer that it names, with the layer.

    Raises:
        ValueError: an entry that fits no layer.
    """
    from fnmatch import fnmatchcase

    layers = []
    for pattern in plan:
        found = [(pattern, layer) for name, layer in module.named_modules() if fnmatchcase(name, pattern)]
        if not found:
            names = [name for name, layer in module.named_modules() if isinstance(layer, _LAYERS)]
            raise ValueError(f"The plan names {pattern!r}, but the module's layers are {names}.")
        layers += found
    return layers


_LAYERS = (torch.nn.Linear, torch.nn.Embedding)


def averages_uneven_parts(mesh: Any) -> bool:
    """Whether torch's mean of a DTensor weighs parts by their size; torch 2.9's does not. Collective over the mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    numbers = torch.arange(mesh.size() + 1.0, device=mesh.device_type)
    divided = distribute_tensor(numbers, mesh, [Shard(0)])
    return bool(whole(divided.mean()) == numbers.mean())


def divided_axes(pattern: str, layer: torch.nn.Module, division: str) -> dict[str, int]:
    """Which dimension of each parameter of a layer is cut; parameters that stay whole are left out.

    Raises:
        ValueError: a layer that cannot be divided, or an unknown division.
    """
    if not isinstance(layer, _LAYERS):
        raise ValueError(
            f"The plan names {pattern!r}, which is a {type(layer).__name__}; torch.nn.Linear and torch.nn.Embedding "
            "can be divided. For other layers divide the parameters with tensor_split."
        )
    if division not in ("column", "row", "output"):
        raise ValueError(f"The plan divides {pattern!r} by {division!r}; write 'column', 'row' or 'output'.")
    if isinstance(layer, torch.nn.Embedding):
        return {"weight": 0 if division == "row" else 1}
    return {"weight": 1} if division == "row" else {"weight": 0, "bias": 0}


def _style(pattern: str, layer: torch.nn.Module, plan: Mapping[str, str], parts: int) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    division = plan[pattern]
    axis = divided_axes(pattern, layer, division)["weight"]
    if division == "output":
        return ColwiseParallel(output_layouts=Replicate())
    if division == "column":
        # A part of another size than the next layer would infer has to say so itself.
        return ColwiseParallel(use_local_output=layer.get_parameter("weight").shape[axis] % parts == 0)
    embeds = isinstance(layer, torch.nn.Embedding)
    return RowwiseParallel(input_layouts=Replicate()) if embeds else RowwiseParallel()
