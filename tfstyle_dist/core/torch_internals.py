"""Names of torch that are private or undocumented, in one place, and the functions of torch that are wrapped.

Each name is looked up when the package is imported. ``tests/core/test_torch_internals.py`` shows what each is for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


def _required(owner: Any, name: str, what_for: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise ImportError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which tfstyle_dist needs to {what_for}. "
            "Install a version of torch that this package was tested with (docs/status.md)."
        )
    return found


swap_insides = _required(torch._C, "_swap_tensor_impl", "let the replicas of one process take turns")
"""Exchanges the insides of two tensors: data, gradient, version counter and the node that accumulates gradients. The
Python objects stay, and a graph stays tied to the inside it was made with. Refuses a tensor that has a C++ weak
reference. (``torch.utils.swap_tensors`` uses it, but makes the old graphs unusable.) Seen in torch 2.13."""

backward_pass_under_way = _required(torch._C, "_current_graph_task_id", "tell the backward passes apart")
"""The number of the backward pass that this thread is in; -1 outside of every pass. Seen in torch 2.13."""

RUN_BACKWARD = "_engine_run_backward"
"""The function of ``torch.autograd`` through which ``backward`` and ``grad`` call the engine, with the arguments
(tensors, gradients, retain_graph, create_graph, inputs, ..., accumulate_grad=whether this is backward). Seen in torch
2.13."""
_required(torch.autograd, RUN_BACKWARD, "make gradients equal at the end of backward()")

lazy_clone: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, "_lazy_clone", torch.clone)
"""A copy that shares memory until either tensor is written to. Without it: a copy. Seen in torch 2.13."""


class Patch:
    """A function of torch that is wrapped as long as somebody needs it.

    What another library has wrapped around it meanwhile stays: the wrapper then only passes calls on.

    Args:
        owner: the module or class that has the function.
        name: of the function.
        wrapper: called with the original function, then the call's arguments.
    """

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._owner, self._name, self._wrapper = owner, name, wrapper
        self._lock = threading.Lock()
        self._users = 0
        self._original: Any = None
        self._installed: Any = None

    def install(self) -> None:
        """One more needs it."""
        with self._lock:
            self._users += 1
            if self._installed is None:
                self._original = getattr(self._owner, self._name)
                self._installed = self._made(self._original)
                setattr(self._owner, self._name, self._installed)

    def uninstall(self) -> None:
        """One fewer needs it; after the last one torch has its own function again."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._owner.__dict__.get(self._name) is self._installed:
                setattr(self._owner, self._name, self._original)
                self._installed = None

    def _made(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._users == 0:
                return original(*args, **kwargs)
            return self._wrapper(original, *args, **kwargs)

        return wrapped


class DataPatch(Patch):
    """Tells who asks a parameter for its ``.data``: what is written to that leaves no mark on the parameter.

    Args:
        noticed: called with the parameter.
    """

    def __init__(self, noticed: Callable[[torch.Tensor], None]) -> None:
        super().__init__(torch.nn.Parameter, "data", noticed)

    def _made(self, original: Any) -> Any:
        def read(parameter: torch.Tensor) -> Any:
            if self._users:
                self._wrapper(parameter)
            return original.__get__(parameter)

        def write(parameter: torch.Tensor, value: torch.Tensor) -> None:
            original.__set__(parameter, value)

        return property(read, write, doc=original.__doc__)

    def uninstall(self) -> None:
        """One fewer needs it; after the last one torch has its own attribute again."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and torch.nn.Parameter.__dict__.get("data") is self._installed:
                del torch.nn.Parameter.data
                self._installed = None
