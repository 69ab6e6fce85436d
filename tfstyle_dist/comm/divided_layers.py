"""Dividing the layers of a model by a plan, with torch's tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tfstyle_dist.comm.mesh import is_divided
from tfstyle_dist.comm.replaced_parameters import note_replaced

_LAYERS = (torch.nn.Linear, torch.nn.Embedding)


def divide_layers(module: torch.nn.Module, mesh: Any, plan: Mapping[str, str]) -> None:
    """Divides layers in place with torch's tensor parallelism.

    Args:
        module: the model.
        mesh: the workers that share it.
        plan: the name of a layer, with ``*`` for any part of a name, and ``"column"``, ``"row"`` or ``"output"``.

    Raises:
        ValueError: no layer has such a name, it is no ``Linear`` or ``Embedding``, another division is named, a layer
            is named twice or divided already, or layers have a parameter in common and would divide it differently.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    layers = planned_layers(module, plan)
    for name, layer in layers:
        _check(name, layer)
    ties = _ties(module, {layer: divided_axes(name, layer, plan[name]) for name, layer in layers})
    before = {name: parameter for name, parameter in module.named_parameters() if not is_divided(parameter)}
    for name, layer in layers:
        parallelize_module(layer, mesh, _style(name, layer, plan, mesh.size()))
    for (first, name), *others in ties:  # each layer has got a parameter of its own
        for owner, other in others:
            owner.register_parameter(other, first.get_parameter(name))
    for name, parameter in before.items():
        if is_divided(module.get_parameter(name)):
            note_replaced(parameter, name)


def _check(pattern: str, layer: torch.nn.Module) -> None:
    """Raises ValueError for a layer that is divided already, or that torch cannot divide."""
    if any(is_divided(parameter) for parameter in layer.parameters(recurse=False)):
        raise ValueError(
            f"The plan names {pattern!r}, a layer that is divided already. Divide each layer once, and leave it out of "
            "later plans."
        )
    if getattr(layer, "max_norm", None) is not None:
        raise ValueError(
            f"The plan names {pattern!r}, an Embedding with max_norm={layer.max_norm}: torch cannot bound the norms of "
            "rows that are divided. Leave it out of the plan, or build it without max_norm."
        )


def _ties(
    module: torch.nn.Module, axes: Mapping[torch.nn.Module, Mapping[str, int]]
) -> list[list[tuple[torch.nn.Module, str]]]:
    """The places of each parameter that several modules have and that one of the layers to be divided has.

    Raises:
        ValueError: they would have it divided in different ways.
    """
    places: dict[int, list[tuple[str, torch.nn.Module, str]]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((f"{prefix}.{name}" if prefix else name, owner, name))
    tied = [some for some in places.values() if len(some) > 1 and any(owner in axes for _, owner, _ in some)]
    for some in tied:
        ways = {path: _way(axes.get(owner), name) for path, owner, name in some}
        if len(set(ways.values())) > 1:
            raise ValueError(
                "One parameter is in several layers, which would have it in different ways: "
                f"{', '.join(f'{path} {way}' for path, way in ways.items())}. Name all of these layers in the plan and "
                "divide them along the same dimension ('row' of an Embedding and 'column' or 'output' of a Linear), or "
                "none of them."
            )
    return [[(owner, name) for _, owner, name in some] for some in tied]


def _way(axes: Mapping[str, int] | None, name: str) -> str:
    if axes is None:
        return "not in the plan"
    return f"cut along dimension {axes[name]}" if name in axes else "whole beside divided ones"


def planned_layers(module: torch.nn.Module, plan: Mapping[str, str]) -> list[tuple[str, torch.nn.Module]]:
    """The entry of the plan for each layer that it names, with the layer.

    Raises:
        ValueError: an entry that fits no layer, or a layer that two entries name.
    """
    from fnmatch import fnmatchcase

    layers: list[tuple[str, torch.nn.Module]] = []
    named: dict[torch.nn.Module, str] = {}
    for pattern in plan:
        found = [(pattern, layer) for name, layer in module.named_modules() if fnmatchcase(name, pattern)]
        if not found:
            names = [name for name, layer in module.named_modules() if isinstance(layer, _LAYERS)]
            raise ValueError(f"The plan names {pattern!r}, but the module's layers are {names}.")
        for _, layer in found:
            if named.setdefault(layer, pattern) != pattern:
                raise ValueError(
                    f"The plan names a {type(layer).__name__} twice, by {named[layer]!r} and by {pattern!r}. Write one "
                    "entry for each layer."
                )
        layers += found
    return layers


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
