"""What is changed in the whole process as long as somebody needs it: hooks of torch, and functions that are wrapped.

docs/architecture.md, "What is changed in other packages", lists every function, where it is wrapped, and for how long.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

# One for all, and its own thread may take it again: the garbage collector lets go of users at any time, also in here.
_lock = threading.RLock()


class CountedUsers:
    """Something in force for the whole process while at least one user needs it."""

    def __init__(self) -> None:
        self._users = 0

    def install(self) -> None:
        """One more needs it."""
        with _lock:
            self._users += 1
            self._needed(self._users == 1)

    def uninstall(self) -> None:
        """One fewer needs it."""
        with _lock:
            self._users -= 1
            self._not_needed(self._users == 0)

    def _needed(self, first: bool) -> None:
        """Puts it in force; called for each user."""
        raise NotImplementedError

    def _not_needed(self, last: bool) -> None:
        """Takes it away after the last user; called for each."""
        raise NotImplementedError


class _Handle(Protocol):
    def remove(self) -> None: ...


class Hooks(CountedUsers):
    """Public hooks of torch that are registered for the whole process, and patches that go with them.

    Args:
        register: each registers one hook and returns its handle.
        patches: what is wrapped because torch has no hook for it.
    """

    def __init__(self, *register: Callable[[], _Handle], patches: Sequence[Patch] = ()) -> None:
        super().__init__()
        self._register, self._patches = register, patches
        self._handles: list[_Handle] = []

    def _needed(self, first: bool) -> None:
        if first:
            self._handles = [register() for register in self._register]
        for patch in self._patches:
            patch.install()

    def _not_needed(self, last: bool) -> None:
        while last and self._handles:
            self._handles.pop().remove()
        for patch in self._patches:
            patch.uninstall()


class Patch(CountedUsers):
    """A function that is wrapped as long as somebody needs it.

    What another library has wrapped around it meanwhile stays, and what it has put in its place is wrapped when the
    next user comes. Of several wrappers of ours in one chain only the last one does something; others pass calls on.

    Args:
        owner: the module or class that has the function.
        name: of the function.
        wrapper: called with the original function, then the call's arguments; for a class method with the class first.
    """

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        super().__init__()
        self._owner, self._name, self._wrapper = owner, name, wrapper
        self._original: Any = None
        self._inherited = False
        self._installed: Any = None
        self._number = 0  # of the wrapper that does something
        self._is_needed = False  # compiled functions look at it: not the number of users, which changes more often

    def _needed(self, first: bool) -> None:
        self._is_needed = True
        if self._installed is None or self._owner.__dict__.get(self._name) is not self._installed:
            self._inherited = self._name not in self._owner.__dict__
            self._number += 1
            stored = inspect.getattr_static(self._owner, self._name)
            if isinstance(stored, classmethod | types.ClassMethodDescriptorType):
                self._original = stored
                self._installed = classmethod(self._made(_with_class(stored, self._owner), self._number))
            else:
                self._original = getattr(self._owner, self._name)
                self._installed = self._made(self._original, self._number)
            setattr(self._owner, self._name, self._installed)

    def _not_needed(self, last: bool) -> None:
        self._is_needed = not last
        if not last or self._owner.__dict__.get(self._name) is not self._installed:
            return  # still needed, or another library's, around ours or in its place
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        self._installed = None

    def _made(self, original: Any, number: int) -> Any:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._is_needed or number != self._number:
                return original(*args, **kwargs)
            return self._wrapper(original, *args, **kwargs)

        return wrapped


def _with_class(stored: Any, owner: type) -> Callable[..., Any]:
    """A class method as a function that is given the class first."""

    @functools.wraps(stored.__get__(None, owner))
    def of_class(kind: type, *args: Any, **kwargs: Any) -> Any:
        return stored.__get__(None, kind)(*args, **kwargs)

    return of_class


class DataPatch(Patch):
    """Tells who asks a tensor for its ``.data``, or sets it: neither leaves a mark on the tensor.

    What is set has an address, but it may be one that the tensor had before.

    Args:
        noticed: called with the tensor and what it gives, or ``None`` if it was set.
    """

    def __init__(self, noticed: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
        super().__init__(torch.Tensor, "data", noticed)

    def _made(self, original: Any, number: int) -> Any:
        def as_of_torch(accessor: Callable[..., Any], tensor: torch.Tensor, *value: torch.Tensor) -> Any:
            """Classes with ``__torch_function__`` know torch's accessors: they would be handed this property's."""
            if has_torch_function_unary(tensor):
                return handle_torch_function(accessor, (tensor,), tensor, *value)
            return accessor(tensor, *value)

        def read(tensor: torch.Tensor) -> Any:
            data = as_of_torch(original.__get__, tensor)
            if self._is_needed and number == self._number:
                self._wrapper(tensor, data)
            return data

        def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
            as_of_torch(original.__set__, tensor, value)
            if self._is_needed and number == self._number:
                self._wrapper(tensor, None)

        return property(read, write, doc=original.__doc__)


def install_for(owner: object, hooks: Sequence[CountedUsers]) -> Callable[[], object]:
    """Installs hooks as long as an object lives.

    Args:
        owner: the object, which is not kept alive.
        hooks: what it needs.

    Returns:
        A function that takes them away sooner.
    """
    for hook in hooks:
        hook.install()
    taken = weakref.finalize(owner, _uninstall, hooks)
    taken.atexit = False
    return taken


def _uninstall(hooks: Sequence[CountedUsers]) -> None:
    for hook in hooks:
        hook.uninstall()
