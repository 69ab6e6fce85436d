"""Taking over the parameters and buffers of modules, through PyTorch's own registration hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from tfstyle_dist.core import sparse_parts, torch_internals
from tfstyle_dist.core.process_hooks import Hooks, Patch
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.ordered import WeakOrderedSet
from tfstyle_dist.variables.record import Placement
from tfstyle_dist.variables.store import ParameterStore, live_stores
from tfstyle_dist.variables.wrapped_twice import wrapped_models

_copied_in_steps: WeakOrderedSet[torch.nn.Module] = WeakOrderedSet()


def _store_in_force() -> ParameterStore | None:
    """The store of the strategy whose scope this thread is in, if that strategy takes modules over."""
    frame = current_frame()
    if frame is None or frame.replica is not None:
        return None
    store: ParameterStore = frame.strategy.parameter_store
    return store if frame.strategy.adopts_modules else None


def _place(tensor: torch.Tensor) -> None:
    """What is made in a scope is on the device that the strategy computes on."""
    frame = current_frame()
    if frame is not None and frame.replica is None and frame.strategy.parameter_store.places:
        frame.strategy.parameter_store.bring_home(tensor)


def _store_of(module: torch.nn.Module) -> ParameterStore | None:
    """The store that takes over what ``module`` registers now: that of the scope, else that of the module."""
    store = _store_in_force()
    if store is not None:
        return store
    return next((known for known in live_stores if module in known.modules), None)


def _on_parameter(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if parameter is None:
        return
    _place(parameter)
    store = _store_of(module)
    if store is None:
        return
    if isinstance(parameter, torch.nn.UninitializedParameter):
        _hook_once(module, _materialized)
        store.modules.add(module)
        return
    store.adopt_parameter(parameter, module, name)
    _watch_norms(module)


def _norm_rows_of_all(module: Any, args: tuple[Any, ...]) -> None:
    """``max_norm`` of an embedding changes the rows that are looked up: here those of all replicas, on all of them."""
    frame = current_frame()
    replica = None if frame is None else frame.replica
    if replica is None or replica.num_replicas_in_sync == 1 or not args:
        return
    rows = replica.all_gather(args[0].detach().reshape(-1), axis=0)
    with torch.no_grad():
        torch.embedding_renorm_(module.weight.detach(), rows.contiguous(), module.max_norm, module.norm_type)


def _watch_norms(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
        _hook_once(module, _norm_rows_of_all)


def _hook_once(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    if not any(known is hook for known in torch_internals.forward_pre_hooks_of(module).values()):
        module.register_forward_pre_hook(hook)


def _on_buffer(module: torch.nn.Module, name: str, buffer: Any) -> None:
    if buffer is None or isinstance(buffer, torch.nn.UninitializedBuffer):
        return
    _place(buffer)
    store = _store_in_force()
    if store is None:
        return
    _adopt_buffer(store, buffer, module, name)


def _adopt_buffer(store: ParameterStore, buffer: torch.Tensor, module: torch.nn.Module, name: str) -> None:
    """Servers hold dense tensors only: what else a module has travels with it, to each worker its own."""
    if store.placement is not Placement.REMOTE or sparse_parts.is_plain(buffer):
        store.adopt_buffer(buffer, module, name)


def _on_module(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    store = _store_of(module)
    if store is None or child is None:
        return
    if name == "parametrizations" or isinstance(child, torch.nn.utils.parametrize.ParametrizationList):
        _refuse_another_class(store, module, name)
    store.modules.add(module)
    if not _is_kept_copy(child):
        _adopt_all(store, child)  # copies that were made by copy.deepcopy came past torch's registration


def _is_kept_copy(module: torch.nn.Module) -> bool:
    """Whether a step has copied a module and does not train it, as the best one so far: each replica has its own."""
    frame = current_frame()
    in_step = frame is not None and frame.replica is not None
    return in_step and module in _copied_in_steps and not any(p.requires_grad for p in module.parameters())


def _refuse_another_class(store: ParameterStore, module: torch.nn.Module, name: str) -> None:
    """``register_parametrization`` changes the class of a module, which all replicas of this process have in common."""
    frame, contents = current_frame(), store.contents
    if frame is None or frame.replica is None or contents is None or contents.count == 1 or not contents.holds(module):
        return
    of_what = f"{name!r}"
    if name == "parametrizations":  # the first one of this module
        module.__class__ = type(module).__bases__[0]
        of_what = f"a {type(module).__name__}"
    raise RuntimeError(
        f"register_parametrization (weight_norm, spectral_norm, orthogonal) of {of_what} inside strategy.run: it makes "
        f"a class for the module, and the {contents.count} replicas of this process have the module, and with it the "
        "class, in common. Call it before strategy.run, best in the scope, or start one process for each replica."
    )


def _materialized(module: torch.nn.Module, _: Any) -> None:
    """A lazy module gets its shape in its first forward; this is called right after."""
    for number, hook in list(torch_internals.forward_pre_hooks_of(module).items()):
        if hook is _materialized:
            del torch_internals.forward_pre_hooks_of(module)[number]
    store = _store_of(module)
    if store is None:
        return
    _adopt_all(store, module)
    if current_frame() is None or _store_in_force() is None:
        store.ensure_equal()
        if store.contents is not None:
            store.prepare(None, ())


def _copy_parameter(original: Any, parameter: torch.Tensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` in a scope: the copy of the strategy's parameter is the strategy's too."""
    known = memo.get(id(parameter))
    copy = original(parameter, memo)
    store = _store_in_force()
    if known is None and store is not None and store.owns(parameter):
        record = find_record(parameter)
        store.adopt_parameter(copy, None, "" if record is None else record.local_name)
    return copy


def _set_state(original: Any, module: torch.nn.Module, state: Any) -> None:
    """What ``copy.deepcopy`` and ``torch.load`` of a module end with: in a scope the copy is the strategy's."""
    original(module, state)
    store = _store_in_force()
    if store is not None:
        _adopt_all(store, module)
    elif (frame := current_frame()) is not None and frame.replica is not None:
        _copied_in_steps.add(module)


registrations = Hooks(
    lambda: torch_module.register_module_parameter_registration_hook(_on_parameter),
    lambda: torch_module.register_module_buffer_registration_hook(_on_buffer),
    lambda: torch_module.register_module_module_registration_hook(_on_module),
    patches=[
        Patch(torch.nn.Parameter, "__deepcopy__", _copy_parameter),
        Patch(torch.nn.Module, "__setstate__", _set_state),
        *wrapped_models,
    ],
)
"""Starts adopting; PyTorch's hooks are process-global, so they ask the calling thread's context."""


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
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, torch.nn.UninitializedParameter):
                raise ValueError(
                    f"Parameter {prefix + '.' if prefix else ''}{name} has no shape yet (lazy module). Run the module "
                    "once on an example inside the scope, then adopt it."
                )
    _adopt_all(store, module)
    return module


def adopt_tensor(store: ParameterStore, tensor: torch.nn.Parameter) -> None:
    """Takes over a tensor of no module, in place, as a parameter.

    Args:
        store: of the strategy.
        tensor: a leaf; it need not be an ``nn.Parameter`` but for parameter servers.

    Raises:
        TypeError: parameter servers take over parameters alone.
        ValueError: it has no shape yet.
    """
    if isinstance(tensor, torch.nn.UninitializedParameter):
        raise ValueError("An UninitializedParameter has no shape yet: materialize it before it is adopted.")
    if store.placement is Placement.REMOTE and not isinstance(tensor, torch.nn.Parameter):
        raise TypeError(
            f"Parameter servers take over a torch.nn.Parameter, got a {type(tensor).__name__}. Write "
            "torch.nn.Parameter(tensor), and use that in the function."
        )
    if store.places and find_record(tensor) is None:
        store.bring_home(tensor)
    store.adopt_parameter(tensor, None, "")


def adopt_new_buffers(store: ParameterStore, module: torch.nn.Module) -> None:
    """Takes over what has come into the places of a module's buffers, as ``module.double()`` puts it there.

    Args:
        store: a module of another one, or of none, is left alone.
        module: without its children.
    """
    if module in store.modules:
        for name, buffer in module.named_buffers(recurse=False):
            if type(buffer) is torch.Tensor and buffer.is_cpu and find_record(buffer) is None:
                _adopt_buffer(store, buffer, module, name)


def _adopt_all(store: ParameterStore, module: torch.nn.Module) -> None:
    """Takes over the parameters and buffers of a module and its children that the store does not own yet."""
    for owner in module.modules():
        store.modules.add(owner)
        _watch_norms(owner)
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, torch.nn.UninitializedParameter):
                _hook_once(owner, _materialized)
                continue
            known = find_record(parameter)
            if known is None and store.places:
                store.bring_home(parameter)
            if known is None or known.store is not store or known.module is None:
                store.adopt_parameter(parameter, owner, name)
        for name, buffer in owner.named_buffers(recurse=False):
            if not isinstance(buffer, torch.nn.UninitializedBuffer):
                if store.places and find_record(buffer) is None:
                    store.bring_home(buffer)
                _adopt_buffer(store, buffer, owner, name)
