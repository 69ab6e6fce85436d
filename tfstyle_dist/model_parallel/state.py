"""``state_dict`` of divided models and their optimizers as full tensors, for any number of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import NotFoundError


def full_state_dict(target: torch.nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """The ``state_dict()`` with full tensors on the CPU, as that of an undivided model.

    Collective over the workers of a replica: all call it, also if one alone saves the result.

    Args:
        target: a module, or a plain optimizer of its parameters.

    Example:
        >>> state = full_state_dict(model)
        >>> if strategy.is_chief:
        ...     torch.save(state, "model.pt")
    """

    def full(leaf: Any) -> Any:
        return mesh.whole(leaf.detach()).to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf

    return dict(nest.map_structure(full, dict(target.state_dict())))


def load_full_state_dict(target: torch.nn.Module | torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Takes back what ``full_state_dict``, or an undivided model, gave; each worker keeps its parts.

    Args:
        target: the module or the optimizer; its division may differ from that of the one that was saved.
        state: the same on all workers.

    Raises:
        NotFoundError: a tensor of the module is not in ``state``, or the module has none of a name that is there.
        ValueError: a tensor of another shape.
    """
    if isinstance(target, torch.optim.Optimizer):
        _load_optimizer(target, state)
        return
    own = target.state_dict(keep_vars=True)
    missing, extra = [name for name in own if name not in state], [name for name in state if name not in own]
    if missing or extra:
        raise NotFoundError(
            f"The state has no {missing}, and the module no {extra}. Give the full_state_dict of a module that has the "
            "same names, or leave out of it what the module does not have."
        )
    tensors = [*target.named_parameters(remove_duplicate=False), *target.named_buffers(remove_duplicate=False)]
    held = {name: own.pop(name) for name, _ in tensors if name in own}
    if own:  # of get_extra_state
        target.load_state_dict({name: state[name] for name in own}, strict=False)
    for name, tensor in held.items():
        if tuple(tensor.shape) != tuple(state[name].shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, in the state it is {tuple(state[name].shape)}; build the "
                "module with the sizes of the saved one."
            )
        if mesh.is_divided(tensor):
            mesh.write_whole(tensor, state[name])
        else:
            with torch.no_grad():
                tensor.copy_(state[name])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {}
    for number, entry in state["state"].items():
        like = parameters[number]
        entries[number] = {key: _entry(value, like) for key, value in entry.items()}
    optimizer.load_state_dict({**state, "state": entries})


def _entry(value: Any, like: torch.Tensor) -> Any:
    """One value of an optimizer's state, as a tensor of its own: torch would update the one that it is given."""
    if not isinstance(value, torch.Tensor):
        return value
    if mesh.is_divided(like) and value.shape == like.shape:
        return mesh.divided_like(value.clone(), like)
    return value.clone()
