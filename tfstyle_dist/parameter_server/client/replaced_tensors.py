"""What the coordinator's program puts in the place of a module's tensor: the servers get its values.

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
_copied_into: weakref.WeakKeyDictionary[RemoteRecord, weakref.ref[torch.Tensor]] = weakref.WeakKeyDictionary()


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


def _stays(store: Any, old: Any, new: Any) -> torch.Tensor | None:
    """The tensor that stays or comes in the module in place of the new one; ``None``: the new one itself."""
    record = find_record(old)
    if new is None or new is old or find_record(new) is not None or not isinstance(record, RemoteRecord):
        return None
    for known, given in list(_copied_into.items()):
        if given() is new and known.store is store:
            return known.tensor  # what is put in two places is one parameter
    local = record.components[0]
    if new.shape != local.shape or new.dtype != local.dtype or (record.kind == "buffer" and new.requires_grad):
        return None
    with torch.no_grad():
        old.copy_(new)
    if record.kind == "parameter":
        _copied_into[record] = weakref.ref(new)
        if old.requires_grad != new.requires_grad:
            old.requires_grad_(new.requires_grad)
    return record.tensor


def _on_parameter(module: torch.nn.Module, name: str, parameter: Any) -> Any:
    store, old = _store_of(module), torch_internals.parameters_of(module).get(name)
    if store is None or isinstance(parameter, torch.nn.UninitializedParameter):
        return None
    kept = _stays(store, old, parameter)
    if kept is None and find_record(old) is not None and find_record(parameter) is None:
        store.adopt_parameter(parameter, module, name)  # of another shape or type
    if kept is not old:
        store.retold += 1  # functions are pickled again, with what the module has now
    return kept


def _on_buffer(module: torch.nn.Module, name: str, buffer: Any) -> Any:
    store, old = _store_of(module), torch_internals.buffers_of(module).get(name)
    if store is None or isinstance(buffer, torch.nn.UninitializedBuffer):
        return None
    kept = _stays(store, old, buffer)
    if kept is None or kept is not old:
        store.retold += 1
    return kept


def _on_module(module: torch.nn.Module, name: str, child: Any) -> None:
    if (store := _store_of(module)) is not None:
        store.retold += 1


_replacements = Hooks(
    lambda: torch_module.register_module_parameter_registration_hook(_on_parameter),
    lambda: torch_module.register_module_buffer_registration_hook(_on_buffer),
    lambda: torch_module.register_module_module_registration_hook(_on_module),
)
