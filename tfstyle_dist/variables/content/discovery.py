"""What a step function uses: modules, optimizers, schedulers and the like that it names.

Looked at are the function's closure, the globals it uses, its defaults and the object it is bound to, the same of the
functions that it names, of those that state has, such as hooks, and of the methods of the program's own classes, the
arguments of ``run``, and what plain objects and short containers among all these hold.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tfstyle_dist.values import PerReplica
from tfstyle_dist.variables.content.carried_names import Carrying, Place, carried_in, with_inner
from tfstyle_dist.variables.content.copies import ATOMS, DICTS, WEAK, referred_to
from tfstyle_dist.variables.content.iterators import is_iterator
from tfstyle_dist.variables.content.stand_ins import is_record
from tfstyle_dist.variables.content.state_objects import BOXES, FEW, Belongs, parts_of

_LIBRARIES = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.dirname(torch.__file__),  # wherever it was built
    os.path.abspath(sys.modules[__name__.partition(".")[0]].__path__[0]),  # this package, which may lie in a checkout
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of a path: a user's own packages, those of a system, and those of other environments."""
_MOST_LOOKED_AT = 256
_Names = tuple[tuple[str, ...], tuple[Place, ...]]
_WRAPPERS: tuple[tuple[type | tuple[type, ...], tuple[str, ...]], ...] = (
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset")),
    ((functools.cached_property, functools.partialmethod, functools.singledispatchmethod), ("func",)),
)
"""What a class has in the place of a function, and where the function is."""
_LOOKED_INTO = type, types.FunctionType, types.MethodType, types.ModuleType, *WEAK
_NOTHING = ATOMS.difference(_LOOKED_INTO) | {PerReplica, np.ndarray}


class Discovery:
    """Finds the objects whose content differs from replica to replica.

    Args:
        take: called with every object that is found, and with what it belongs to; says whether its attributes are
            content now.
        classes: whether to look at the methods of classes.

    Attributes:
        tensors: what the function names and all replicas share, such as data; not what it is given.
        carrying: the functions that give other values to variables that they have read, and these variables' names.
        iterators: what the function names of them; not what it is given.
        in_order: whether all processes must find the same in the same order; if so, sets are not looked into.
    """

    def __init__(self, take: Callable[[Any, Belongs], bool], classes: bool = True) -> None:
        self._take, self._classes, self.in_order = take, classes, False
        self.tensors: list[torch.Tensor] = []
        self.carrying: list[Carrying] = []
        self.iterators: list[Any] = []
        # Of the user's own functions what they name; of functions of libraries nothing.
        self._names: weakref.WeakKeyDictionary[types.CodeType, _Names] = weakref.WeakKeyDictionary()
        self._following = self._in_arguments = False
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()  # functions that objects have, and classes
        self._named: set[str] = set()  # by functions that were looked at, also in texts
        self._methods: dict[str, list[weakref.ref[types.FunctionType]]] = {}  # that no function has named yet
        self._bound: dict[tuple[int, str], tuple[weakref.ref[types.FunctionType], int]] = {}  # globals by ``id``
        self._known_tensors: dict[int, weakref.ref[torch.Tensor]] = {}  # that these functions name
        self._known_carrying: dict[int, tuple[weakref.ref[types.FunctionType], tuple[Place, ...]]] = {}

    def look(self, function: Any, arguments: Iterable[Any]) -> None:
        """Takes what a function and its arguments name.

        Args:
            function: what ``run`` was given.
            arguments: its arguments.
        """
        seen: set[int] = set()
        self.forget()
        self._in_arguments = False
        self._look_again()
        self._value(function, seen, (), 0)
        if isinstance(called := vars(type(function)).get("__call__"), types.FunctionType):
            self._value(called, seen, (), 0)
        known = {number: tensor for number, held in self._known_tensors.items() if (tensor := held()) is not None}
        if len(known) < len(self._known_tensors):
            self._known_tensors = {number: self._known_tensors[number] for number in known}
        named = [*self.tensors, *known.values()]
        alive = {number: (f, names) for number, (held, names) in self._known_carrying.items() if (f := held())}
        if len(alive) < len(self._known_carrying):
            self._known_carrying = {number: self._known_carrying[number] for number in alive}
        self.carrying += alive.values()
        self._in_arguments = True  # ``run`` gives every replica a dict of its own
        for argument in arguments:
            self._value(argument, seen, (), 0)
        self._in_arguments = False
        self.tensors = named

    def follow(self, function: Any) -> None:
        """Takes what a function names that a module, a parameter or another object has, such as a hook; once."""
        kept = self.tensors, self.carrying, self.iterators, self._following, self._in_arguments
        self.forget()
        self._following, self._in_arguments = True, False
        try:
            self._value(function, set(), (), 0)
            self._known_tensors.update((id(tensor), weakref.ref(tensor)) for tensor in self.tensors)
            self._known_carrying.update((id(f), (weakref.ref(f), names)) for f, names in self.carrying)
        finally:
            self.tensors, self.carrying, self.iterators, self._following, self._in_arguments = kept

    def follow_class(self, kind: type) -> None:
        """Takes what the methods of a class name, if it is the program's own; once.

        These are the methods that take the place of a library's, such as ``forward``, or that are called by no name,
        and others as soon as a function that was looked at names one: not those for another part of the program.
        Objects that the class has, such as a descriptor that counts, are taken as if a function named them.
        """
        if not self._classes or kind in self._followed:
            return
        libraries = {name for one in kind.__mro__ if is_of_library(one) for name in vars(one)}
        for one in kind.__mro__[:-1]:
            if one in self._followed or is_of_library(one):
                continue
            self._followed.add(one)
            for name, held in list(vars(one).items()):
                if not (functions := _functions_of(held)) and not name.startswith("__"):
                    self.follow(held)
                for function in functions:
                    if _is_library(getattr(_unwrapped(function), "__code__", function.__code__).co_filename):
                        continue
                    if name in self._named or name.startswith("__") or name in libraries:
                        self.follow(function)
                    else:
                        self._methods.setdefault(name, []).append(weakref.ref(function))

    def _look_again(self) -> None:
        """A followed function that finds another object under a name takes that."""
        for (place, name), (reference, number) in list(self._bound.items()):
            if (function := reference()) is None:
                del self._bound[place, name]
            elif (now := id(function.__globals__.get(name))) != number:
                self._bound[place, name] = reference, now
                self._followed.discard(function)
                self.follow(function)

    def forget(self) -> None:
        """What was found is not needed any more."""
        self.tensors, self.carrying, self.iterators = [], [], []

    def _value(
        self, value: Any, seen: set[int], names: Sequence[str], depth: int, belongs: Belongs = Belongs.BESIDE
    ) -> None:
        kind = type(value)
        if kind in _NOTHING or id(value) in seen:
            return
        seen.add(id(value))
        if issubclass(kind, types.ModuleType):
            # Not by value.__file__ and value.__dict__: a module may load itself, or much else, when it is asked.
            held = object.__getattribute__(value, "__dict__")
            if depth == 0 and not _is_library(held.get("__file__")):
                for name in names:
                    self._value(held.get(name), seen, (), 1)
        elif issubclass(kind, WEAK):  # as a callback refers to its trainer
            self._value(referred_to(value), seen, names, depth)
        elif kind is torch.Tensor and not value.requires_grad:
            self.tensors.append(value)
        elif isinstance(value, type):
            self.follow_class(value)
            if kind is not type:
                self.follow_class(kind)
            self._held_by(value, seen, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, seen)
        elif isinstance(value, types.MethodType):
            self._value(value.__func__, seen, (), depth)
            self._value(value.__self__, seen, (), depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._value(part, seen, (), depth)
        elif isinstance(value, (*BOXES, frozenset)):
            if depth < 3 and not (self.in_order and isinstance(value, set | frozenset)):
                if isinstance(value, dict) and not self._in_arguments:
                    self._take(value, belongs)
                for part in (parts := parts_of(value, _MOST_LOOKED_AT)):
                    if not is_record(part, len(parts)):
                        self._value(part, seen, (), depth + 1, belongs)
                    elif depth < 1:
                        self._attributes(part, seen, depth + 1)
        elif isinstance(value, torch.Tensor):
            if not self._take(value, Belongs.NOTHING) and type(value) is torch.Tensor and not value.requires_grad:
                self.tensors.append(value)
        elif is_iterator(kind):
            self.iterators += () if self._in_arguments else (value,)
        elif not self._take(value, belongs) and depth < 2:
            self._attributes(value, seen, depth)

    def _held_by(self, kind: type, seen: set[int], depth: int) -> None:
        """What a class of the program's has now, such as its only object; not a long registry."""
        for one in (*kind.__mro__[:-1], type(kind)) if depth < 2 else ():
            for name, held in list(vars(one).items())[:_MOST_LOOKED_AT] if one in self._followed else ():
                few = not isinstance(held, BOXES) or len(held) <= FEW  # it is looked at in each run
                if few and type(held) not in _NOTHING and type(held) not in _LOOKED_INTO and not name.startswith("__"):
                    self._value(held, seen, (), depth + 1)

    def _attributes(self, value: Any, seen: set[int], depth: int) -> None:
        """What an object holds that is no state itself."""
        if (type(value).__module__ or "").partition(".")[0] in ("torch", "tfstyle_dist", "numpy", "keras"):
            return
        held = getattr(value, "__dict__", None)
        if type(held) is dict and len(held) <= _MOST_LOOKED_AT:
            for part in list(held.values()):
                self._value(part, seen, (), depth + 1, Belongs.NOTHING)
        for kind in type(value).__mro__[:-1]:
            for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    self._value(getattr(value, slot.__name__, None), seen, (), depth + 1, Belongs.NOTHING)

    def _function(self, function: types.FunctionType, seen: set[int]) -> None:
        if self._following:
            if function in self._followed:
                return
            self._followed.add(function)
        closed: list[Any] = []
        for cell in function.__closure__ or ():
            try:
                closed.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        for value in _dicts_first(closed):
            self._value(value, seen, (), 0)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(default, seen, (), 0)
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._value(_unwrapped(wrapped), seen, (), 0)
        (names, carried), space = self._names_of(function.__code__), function.__globals__
        if carried:
            self.carrying.append((function, carried))
        named = {name: space[name] for name in names if name in space}
        if self._following:
            mine = weakref.ref(function)
            self._bound.update(((id(function), n), (mine, id(v))) for n, v in named.items() if type(v) not in ATOMS)
        for value in _dicts_first(list(named.values())):
            self._value(value, seen, names, 0)

    def _names_of(self, code: types.CodeType) -> _Names:
        known = self._names.get(code)
        if known is None:
            library = _is_library(code.co_filename)
            codes = [] if library else list(with_inner(code))
            names = dict.fromkeys(name for c in codes for name in c.co_names)
            known = self._names[code] = tuple(names), () if library else carried_in(code)
            self._note_names({*names, *(text for c in codes for text in c.co_consts if type(text) is str)})
        return known

    def _note_names(self, names: set[str]) -> None:
        """A function names these: methods that are called so are looked at."""
        self._named |= names
        for name in names & self._methods.keys():
            for reference in self._methods.pop(name, ()):
                if (method := reference()) is not None:
                    self.follow(method)


def _dicts_first(values: list[Any]) -> list[Any]:
    """The same values, and before them those which objects that have one of them must find taken."""
    return [value for value in values if type(value) in DICTS] + values


def _functions_of(held: Any) -> list[types.FunctionType]:
    """Those of a method, a static method, a property and the like."""
    names = next((names for kind, names in _WRAPPERS if issubclass(type(held), kind)), ())
    found = [held, *(getattr(held, name, None) for name in names)]
    return [function for function in found if type(function) is types.FunctionType]


def _unwrapped(function: Any) -> Any:
    try:
        return inspect.unwrap(function)
    except ValueError:  # it wraps itself
        return function


def is_of_library(kind: type) -> bool:
    """Whether a class is not the program's; notebooks have no file, nor have the modules that Python is made with."""
    name = str(kind.__module__)
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] in sys.stdlib_module_names if file is None else _is_library(file)


def _is_library(path: str | None) -> bool:
    return path is None or path.startswith(("<frozen", *_LIBRARIES)) or any(name in path for name in _INSTALLED)
