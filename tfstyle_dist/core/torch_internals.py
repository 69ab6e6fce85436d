"""Every name of torch that is private or undocumented, in one place.

Each name is looked up when the package loads torch; of a module that ``import torch`` does not load, when it is first
used; what it is for stands beside it. A torch without it raises ``ImportError`` that says so. All names were seen in
torch 2.9.1, 2.13.0 and 2.15.0. ``tests/core/test_torch_internals.py`` shows what each must do.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from tfstyle_dist.core import torch_releases
from tfstyle_dist.core.process_hooks import Patch

torch_releases.warn_if_untested(torch.__version__)


def _required(path: str, what_for: str, owner: Any = torch) -> Any:
    """What is found at ``path``, whose first part is the name of ``owner``."""
    found = owner
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
        if found is None:
            _refuse(path, what_for)
    return found


def _refuse(path: str, what_for: str) -> None:
    raise ImportError(
        f"torch {torch.__version__} has no {path}, which tfstyle_dist needs to {what_for}. Install a version of torch "
        "that this package was tested with (docs/status.md)."
    )


# ---- autograd -------------------------------------------------------------------------------------------------

swap_insides = _required("torch._C._swap_tensor_impl", "let the replicas of one process take turns")
"""Exchanges the insides of two tensors: data, gradient, version counter, the node that accumulates gradients, and so
graphs. Refuses one that has a C++ weak reference. (``torch.utils.swap_tensors`` makes the old graphs unusable.)"""

backward_pass_under_way = _required("torch._C._current_graph_task_id", "tell the backward passes apart")
"""The number of the backward pass that this thread is in; -1 outside of every pass."""

RUN_BACKWARD = "_engine_run_backward"
"""The function of ``torch.autograd`` through which ``backward`` and ``grad`` call the engine, with the arguments
(tensors, gradients, retain_graph, create_graph, inputs, ..., accumulate_grad=whether this is backward). Its frames have
this name too, by which a backward pass inside of another one is seen."""
if _required(f"torch.autograd.{RUN_BACKWARD}", "make gradients equal after backward()").__name__ != RUN_BACKWARD:
    _refuse(f"function that is called {RUN_BACKWARD}", "see a backward pass inside of another one")

queue_end_of_backward = _required("torch.autograd.Variable._execution_engine.queue_callback", "reduce gradients")
"""Calls a function without arguments when the backward pass that this thread is in is over."""
version_of: Callable[[torch.Tensor], int] = _required("torch.Tensor._version", "see writes to tensors").__get__
"""How often a tensor, or one that shares its memory as a view, was written to."""
set_versions = _required("torch._C._autograd._unsafe_set_version_counter", "undo what a replica has written")
"""``(tensors, versions)``: from now on each was written to so often."""
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of a tensor that hold its hooks by number, or ``None``."""
for _name in HOOKS:
    _required(f"torch.Tensor.{_name}", "give each replica hooks of its own")
hooks_of: Callable[[torch.Tensor], tuple[Any, Any]] = attrgetter(*HOOKS)

FUNC_WRAPS = {"eager_transforms": "_wrap_for_grad", "vmap": "_add_batch_dim"}
"""The functions, by module of ``func``, that take a tensor, their first argument, past ``__torch_function__``."""
for _name in FUNC_WRAPS:
    _required(f"torch._functorch.{_name}.{FUNC_WRAPS[_name]}", "give torch.func the values of variables")
func: Any = _required("torch._functorch", "give torch.func the values of variables")
transforms_are_active: Callable[[], bool] = _required("torch._C._are_functorch_transforms_active", "pull in torch.func")
outside_of_transforms: Any = _required("func.pyfunctorch.temporarily_clear_interpreter_stack", "pull in func", func)
"""A context manager in which no function of ``torch.func`` is under way."""

DisableTorchFunctionSubclass = _required("torch._C.DisableTorchFunctionSubclass", "read the storage of a variable")
"""A context manager under which ``__torch_function__`` of subclasses is not called."""
has_compatible_shallow_copy_type = _required("torch._has_compatible_shallow_copy_type", "let module.to move parameters")
"""What ``torch.nn.Module.to`` asks before it puts new data into a parameter instead of replacing it."""
make_subclass = _required("torch.Tensor._make_subclass", "make variables")
"""``(class, data, requires_grad)``: a leaf of a subclass of ``torch.Tensor`` that shares the memory of ``data``."""
_users_of: Callable[[int], int] = _required("torch._C._storage_Use_Count", "see who shares the memory of a parameter")


def lie_alone(*tensors: torch.Tensor) -> bool:
    """Whether no other tensors share the memory of some, which share it."""
    memory = tensors[0].untyped_storage()
    return _users_of(memory._cdata) == len(tensors) + 1  # and this object


_lazy_clone: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, "_lazy_clone", torch.clone)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares memory until either tensor is written to; where torch cannot do that, a copy.

    It cannot with memory that is not torch's own, such as that of a message (``torch.frombuffer``). For the CPU only:
    CUDA's kernels for lists of tensors ask for memory that they read, and write to it. Rows of a sparse gradient cannot
    be added to one: torch would make the copy in several threads, and refuses.
    """
    try:
        return _lazy_clone(tensor)
    except RuntimeError:
        return tensor.clone()


LIST_WRITES = tuple(name for name in dir(torch) if re.fullmatch(r"_foreach_[a-z0-9_]+_", name))
"""Functions that write to a list of tensors, their first argument; on a GPU the tensors' ``_version`` may stay."""
_fused = [f"_fused_{kind}_" for kind in ("adagrad", "adam", "adamw", "sgd")]
UNMARKED_WRITES = ("_amp_foreach_non_finite_check_and_unscale_", *_fused)
"""Functions that write to lists of tensors and leave their ``_version`` as it is on every device."""
foreach_copy_ = _required("torch._foreach_copy_", "copy many gradients in one call")
foreach_add_ = _required("torch._foreach_add_", "add many gradients in one call")
foreach_mul_ = _required("torch._foreach_mul_", "divide many gradients in one call")
"""``(targets, others)``: ``copy_``, ``add_`` and ``mul_`` of each pair; ``mul_`` also takes one for all."""
entries_of: Callable[[torch.Tensor], int] = _required("torch.Tensor._nnz", "count the rows of a sparse gradient")
"""How many entries a sparse tensor stores; of one that is not coalesced, those of one place are counted each."""
indices_of: Callable[[torch.Tensor], torch.Tensor] = _required("torch.Tensor._indices", "add sparse gradients")
values_of: Callable[[torch.Tensor], torch.Tensor] = _required("torch.Tensor._values", "add sparse gradients")
"""Where a sparse COO tensor's entries are, and what is there; ``indices()`` refuses what is not coalesced."""


def local_part(tensor: Any) -> torch.Tensor:
    """This worker's part of a DTensor, as it is stored (``to_local()`` may wrap it anew and knows of gradients)."""
    return _required("DTensor._local_tensor", "read the parts of divided models", tensor)  # type: ignore[no-any-return]


# ---- modules --------------------------------------------------------------------------------------------------

BUFFERS = "_buffers"
"""The attribute of a module that holds its own buffers by name."""
for _name in ("_parameters", BUFFERS, "_modules", "_forward_pre_hooks"):
    if not isinstance(torch.nn.Module().__dict__.get(_name), dict):
        _refuse(f"torch.nn.Module.{_name}", "follow the parameters and buffers of modules")

parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter(BUFFERS)
"""A module's own parameters and buffers by name: what is written to the dictionary is registered, past all hooks."""
buffers_among: Callable[[dict[str, Any]], dict[str, torch.Tensor | None]] = itemgetter(BUFFERS)
"""The buffers among the attributes of a module."""
registered_among: Callable[[dict[str, Any]], tuple[Any, Any]] = itemgetter("_modules", "_parameters")
"""The modules and the parameters among the attributes of a module."""
PARAMETRIZED = "_cache", "_cache_enabled"
"""What ``parametrize.cached`` keeps of all modules, and in how many such blocks the program is."""
for _name in PARAMETRIZED:
    _required(f"torch.nn.utils.parametrize.{_name}", "give replicas parametrized values of their own")
forward_pre_hooks_of: Callable[[torch.nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")
"""A module's forward pre-hooks by number; ``copy.deepcopy`` of a module copies them, but not their handles."""

# ---- optimizers -----------------------------------------------------------------------------------------------

_required("torch.optim.Optimizer._patch_step_function", "see which optimizers torch calls hooks for")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch calls hooks around ``step``, which ``Optimizer.__init__`` arranges and marks in the class."""
    return hasattr(type(optimizer).step, "hooked")


_OWN_OPTIMIZERS = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
hooks_of_step = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
HOOKS_OF_STEPS = [(torch_optimizer, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post")]
_kinds = "forward_pre", "forward", "backward_pre", "backward"
HOOKS_OF_MODULES = [(torch_module, f"_global_{kind}_hooks") for kind in _kinds]
"""Where torch has the hooks of all optimizers and of all modules: dicts by number, as attributes of two modules."""
for _owner, _name in HOOKS_OF_STEPS + HOOKS_OF_MODULES:
    _required(f"torch.{_name}", "give replicas hooks of their own", _owner)
in_function_mode: Callable[[], int] = _required("torch._C._len_torch_function_stack", "see a default device")
"""How many function modes are in force: a default device is one, so without any it is the CPU."""
_in_dispatch_mode: Callable[[], int] = _required("torch._C._len_torch_dispatch_stack", "see whose code steps")


def steps_by_torch_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch alone, which draws no random numbers, runs between our hooks around a step without closure."""
    plain = type(optimizer) in _OWN_OPTIMIZERS and [len(getattr(*place)) for place in HOOKS_OF_STEPS] == [1, 1]
    return plain and not (any(hooks_of_step(optimizer)) or in_function_mode() or _in_dispatch_mode())


DispatchMode = _required("torch.utils._python_dispatch.TorchDispatchMode", "give replicas modes")
dispatch_modes = _required("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "give replicas modes")
function_modes = _required("torch.overrides._get_current_function_mode_stack", "give replicas modes")
"""The modes that are in force in this thread, the outermost first; a default device is a function mode."""
DEVICE_MODES = "torch.utils._device"
"""The module of that mode's class, which torch loads when it is needed."""
saved_hooks = _required("torch._C._autograd._top_saved_tensors_default_hooks", "give replicas hooks")
"""``(True)``: the innermost pair of functions given to ``saved_tensors_hooks`` in this thread, or ``None``."""

# ---- nests, profiler, input -----------------------------------------------------------------------------------

pytree = _required("torch.utils._pytree", "walk nested structures")
"""Nested structures of lists, tuples, dictionaries and what programs register."""
_NESTS = "SUPPORTED_NODES", "TreeSpec", "tree_flatten", "tree_is_leaf", "tree_leaves", "tree_map", "tree_unflatten"
for _name in _NESTS:
    _required(f"torch.utils._pytree.{_name}", "walk nested structures")

WeakIdKeyDictionary = _required("torch.utils.weak.WeakIdKeyDictionary", "know the tensors of a strategy")
"""A dictionary whose keys are told apart by ``is``, and not kept alive."""
MACHINERY = (
    "torch._C", "torch._dynamo", "torch._functorch", "torch._inductor", "torch._ops", "torch.distributed",
    "torch.futures", "torch.fx", "torch.jit", "torch.multiprocessing", "torch.profiler", "torch.utils.data",
    "torch.utils.hooks",
)  # fmt: skip
"""Packages of torch whose objects are no state of a training program."""
_required("torch.autograd.profiler._is_profiler_enabled", "name its work in the profiler's traces")

UNTRACED = "_torchdynamo_disable"
"""The attribute of a function that ``torch.compile`` does not trace, though it is called by one that it traces."""
_frames: Any = _required("torch._C._dynamo.eval_frame", "be compiled")
run_as: Callable[[Any, Any], None] = _required("frames.set_code_exec_strategy", "be compiled", _frames)
IN_PYTHON = _required("frames._FrameExecStrategy", "be compiled", _frames)(*[_frames._FrameAction.SKIP] * 2)
"""``run_as(code, IN_PYTHON)``: ``torch.compile`` leaves a code object alone, and what is called there."""


def share_graph_trees() -> None:
    """Lets all threads record CUDA graphs of compiled functions; before torch 2.13 one, and autograd's own, could."""
    if "torch._dynamo" in sys.modules and torch_releases.release(torch.__version__) < (2, 13):
        trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
        if isinstance(trees.local, threading.local):
            made: dict[str, Any] = {"tree_manager_containers": {}, "tree_manager_locks": defaultdict(threading.Lock)}
            trees.local = SimpleNamespace(**(made | vars(trees.local)))


compiling: Callable[[], Any] = _required("torch._guards.TracingContext.try_get", "be compiled")
"""What ``torch.compile`` knows of the function that it looks at, if its own code runs in this thread; or ``None``."""


def is_profiling() -> bool:
    """Whether a profiler of torch runs, seen from every thread."""
    return torch.autograd.profiler._is_profiler_enabled


profiler_config: Any = _required("torch.profiler._ExperimentalConfig", "see the threads of all replicas in a trace")
"""The ``experimental_config`` of ``torch.profiler.profile``; with ``profile_all_threads=True`` it sees all threads."""


def reader_processes(iterator: Any) -> list[Any]:
    """The processes that read for an iterator of a ``DataLoader``; none for other iterators."""
    return list(getattr(iterator, "_workers", ()))


_required("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers", "end readers that failed")


def end_reader_processes(iterator: Any) -> None:
    """Ends them."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


def default_store() -> Any:
    """The key-value store of the default process group of ``torch.distributed``."""
    import torch.distributed.distributed_c10d as c10d

    return _required("c10d._get_default_store", "let workers tell each other what they wait for", c10d)()


def limit_of_group(process_group: Any) -> timedelta | None:
    """The shortest limit of a wait with which a process group was made; ``None`` where its backends do not say."""
    limits = []
    for device in _required("group._device_types", "adopt a process group", process_group):
        with suppress(RuntimeError, AttributeError):  # a backend that was written in Python need not have options
            limits.append(process_group._get_backend(device).options._timeout)
    return min(limits, default=None)


def group_among(name: str, ranks: Sequence[int], backend: str, limit: timedelta) -> Any:
    """A new process group of some processes of the default group, which they alone make; they all call this.

    torch's own name for it may differ between processes that belong to other groups as well, and comes again after it
    was destroyed: they would wait at different places of the store, or find the addresses of the group before.

    Args:
        name: that no group of these processes has had.
        ranks: the members, in the numbers of the default group, in ascending order.
        backend: as for ``torch.distributed.new_group``.
        limit: of each wait.
    """
    import torch.distributed.distributed_c10d as c10d

    _required("c10d._process_group_name", "make groups of some processes", c10d)
    naming = Patch(c10d, "_process_group_name", lambda original, *args, **kwargs: name)
    naming.install()
    try:
        return c10d.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
    finally:
        naming.uninstall()


def sparse_of(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], coalesced: bool) -> torch.Tensor:
    """The sparse tensor of such parts."""
    return torch.sparse_coo_tensor(indices, values, list(shape), check_invariants=False)._coalesced_(coalesced)
