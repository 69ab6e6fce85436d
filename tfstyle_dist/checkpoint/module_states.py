"""What the ``state_dict`` of a module is made of, and whether the module must take it back itself."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tfstyle_dist.checkpoint.on_servers import source_of
from tfstyle_dist.comm import mesh
from tfstyle_dist.variables import Variable
from tfstyle_dist.variables.logical_state import write_logical

EXTRA = "_extra_state"
"""How the name of a module's extra state ends."""

_METHODS = frozenset(name for name in vars(torch.nn.Module) if name.endswith("state_dict"))


def state_of(module: torch.nn.Module) -> Any:
    """The state of a module, with its own tensors in it where it gives them."""
    if not _accepts(module.state_dict, "keep_vars"):
        return module.state_dict()
    return module.state_dict(keep_vars=True)


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def takes_itself(module: torch.nn.Module) -> bool:
    """Whether a module must be given its state by ``load_state_dict``: hooks or methods of its own belong to it.

    Else each entry is written in place. So is all of a module with tensors in parts or on servers, whose values no
    single process holds; one that is lazy takes nothing yet.
    """
    state = state_of(module)
    entries = list(state.values()) if isinstance(state, Mapping) else []
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    if any(mesh.is_divided(tensor) or source_of(tensor) is not None or is_lazy(tensor) for tensor in tensors):
        return False
    if any(_has_own_way(part) for part in module.modules()) or not isinstance(state, Mapping):
        return True
    own = [*module.parameters(), *module.buffers()]
    known = {id(tensor) for tensor in own} | {place for tensor in own if (place := _memory(tensor)) is not None}
    others = [key for key, entry in state.items() if not isinstance(entry, torch.Tensor) and not key.endswith(EXTRA)]
    return bool(others) or any(id(tensor) not in known and _memory(tensor) not in known for tensor in tensors)


def _has_own_way(module: torch.nn.Module) -> bool:
    """Whether a module has hooks for loading, or methods for its state that ``torch.nn`` does not have."""
    kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.nn.")]
    methods = any(name in _METHODS for kind in kinds for name in vars(kind))
    return methods or any("load_state_dict" in name and held for name, held in vars(module).items())


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own
        return None


def keep(module: torch.nn.Module) -> Callable[[], None]:
    """Copies the state of a module to the CPU; the result puts it back."""
    state = module.state_dict()
    if not isinstance(state, Mapping):
        kept: Any = copy.deepcopy(state)
    else:
        kept = copy.copy(state)
        kept.update({key: _kept(entry) for key, entry in state.items()})
    return lambda: _load(module, kept)


def _kept(entry: Any) -> Any:
    return entry.detach().to("cpu", copy=True) if isinstance(entry, torch.Tensor) else copy.deepcopy(entry)


def take(module: torch.nn.Module, saved: Any) -> tuple[list[str], list[str]]:
    """Gives a module a state that was saved.

    Args:
        module: writes the state to all replicas of this process, as everything outside of ``run``.
        saved: the state; variables of it are their values over all replicas.

    Returns:
        The names that the module wants and the state lacks, and those that the module did not expect.
    """
    state = state_of(module)
    if not isinstance(state, Mapping) or not isinstance(saved, Mapping):
        _load(module, saved)
        return [], []
    given: OrderedDict[str, Any] = OrderedDict(saved)
    vars(given).update(getattr(state, "__dict__", {}))  # the versions of the modules
    for key, entry in state.items():
        if isinstance(entry, Variable) and key in given:
            write_logical(entry, given[key])
            given[key] = entry.value()
    result = _load(module, given)
    return list(getattr(result, "missing_keys", ())), list(getattr(result, "unexpected_keys", ()))


def _load(module: torch.nn.Module, state: Any) -> Any:
    if _accepts(module.load_state_dict, "strict"):
        return module.load_state_dict(state, strict=False)
    return module.load_state_dict(state)
