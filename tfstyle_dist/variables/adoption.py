"""Taking over the parameters and buffers of modules, through PyTorch's own registration hooks."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.variables.store import ParameterStore, find_record

_lock = threading.Lock()
_users = 0
_handles: list[Any] = []


def _store_in_force() -> ParameterStore | None:
    """The store of the strategy whose scope this thread is in, if that strategy takes modules over."""
    frame = current_frame()
    if frame is None or frame.replica is not None:
        return None
    store: ParameterStore = frame.strategy.parameter_store
    return store if frame.strategy.adopts_modules else None


def _on_parameter(module: torch.nn.Module, name: str, parameter: Any) -> None:
    store = _store_in_force()
    if store is None or parameter is None:
        return
    if isinstance(parameter, torch.nn.UninitializedParameter):
        # Lazy modules get their shape at a dry run in the scope; adopted then (see adopt_module).
        return
    store.adopt_parameter(parameter, module, name)


def _on_buffer(module: torch.nn.Module, name: str, buffer: Any) -> None:
    store = _store_in_force()
    if store is None or buffer is None or isinstance(buffer, torch.nn.UninitializedBuffer):
        return
    store.adopt_buffer(buffer, module, name)


def _on_module(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    store = _store_in_force()
    if store is not None and child is not None:
        store._modules.add(module)


def install() -> None:
    """Starts adopting; PyTorch's hooks are process-global, so they ask the calling thread's context."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(torch_module.register_module_parameter_registration_hook(_on_parameter))
            _handles.append(torch_module.register_module_buffer_registration_hook(_on_buffer))
            _handles.append(torch_module.register_module_module_registration_hook(_on_module))


def uninstall() -> None:
    """Ends what ``install`` began; the last user takes the hooks away."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _handles:
                _handles.pop().remove()


def adopt_module(store: ParameterStore, module: torch.nn.Module) -> torch.nn.Module:
    """Takes over all parameters and buffers of an existing module, in place.

    Args:
        store: the adopting strategy's store.
        module: built outside the scope, or with entries that lost their adoption.

    Returns:
        The same module.

    Raises:
        ValueError: the module has uninitialised (lazy) parameters.
        RuntimeError: a parameter belongs to another strategy.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"experimental_adopt takes a torch.nn.Module, got {type(module).__name__}.")
    for prefix, owner in module.named_modules():
        store._modules.add(owner)
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, torch.nn.UninitializedParameter):
                raise ValueError(
                    f"Parameter {prefix + '.' if prefix else ''}{name} has no shape yet (lazy module). Run the module "
                    "once on an example inside the scope, then adopt it."
                )
            known = find_record(parameter)
            if known is None or known.store is not store:
                store.adopt_parameter(parameter, owner, name)
        for name, buffer in owner.named_buffers(recurse=False):
            known = find_record(buffer)
            if known is None or known.store is not store:
                store.adopt_buffer(buffer, owner, name)
    return module
