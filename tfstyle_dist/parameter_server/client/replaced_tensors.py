"""What the coordinator's program puts in the place of a module's tensor reaches functions that were scheduled before.

PyTorch's registration hooks see ``module.scale = tensor``, ``module.weight = nn.Parameter(...)`` and
``load_state_dict(..., assign=True)``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.process_hooks import Hooks, install_for
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.variables.known_tensors import find_record

_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(store: Any) -> None:
    """From now on sees what comes into the modules of a store, as long as there is the store."""
    _stores.add(store)
    install_for(store, [_replacements])


def _store_of(module: torch.nn.Module) -> Any:
    """The store that has a module, unless a scope is in force, in which everything is taken over anyway."""
    if current_frame() is not None:
        return None
    for store in list(_stores):
        if module in store.modules and (strategy := store.strategy) is not None and not strategy.closed:
            return store
    return None


def _on_parameter(module: torch.nn.Module, name: str, parameter: Any) -> None:
    """The new one comes in; optimizers keep the one that was there, as in torch."""
    store, old = _store_of(module), torch_internals.parameters_of(module).get(name)
    if store is None or parameter is old or isinstance(parameter, torch.nn.UninitializedParameter):
        return
    if parameter is not None and find_record(parameter) is None:
        store.adopt_parameter(parameter, module, name)
    store.retold += 1  # functions are pickled again, with what the module has now


def _on_buffer(module: torch.nn.Module, name: str, buffer: Any) -> Any:
    """The tensor that is there stays and gets the values, if it can have them."""
    store, old = _store_of(module), torch_internals.buffers_of(module).get(name)
    if store is None or buffer is old or isinstance(buffer, torch.nn.UninitializedBuffer):
        return None
    record = find_record(old)
    if buffer is not None and find_record(buffer) is None and isinstance(record, RemoteRecord):
        local = record.components[0]
        if buffer.shape == local.shape and buffer.dtype == local.dtype and not buffer.requires_grad:
            with torch.no_grad():
                old.copy_(buffer)  # type: ignore[union-attr]
            return record.tensor
    store.retold += 1
    return None


def _on_module(module: torch.nn.Module, name: str, child: Any) -> None:
    if (store := _store_of(module)) is not None:
        store.retold += 1


_replacements = Hooks(
    lambda: torch_module.register_module_parameter_registration_hook(_on_parameter),
    lambda: torch_module.register_module_buffer_registration_hook(_on_buffer),
    lambda: torch_module.register_module_module_registration_hook(_on_module),
)
