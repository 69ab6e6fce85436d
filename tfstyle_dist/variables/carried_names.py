"""Variables of a program that a step reads and then gives another tensor, as the hidden state of a recurrent network.

``global hidden`` or ``nonlocal hidden`` in a step: the replicas of one process share the variable, so each goes on with
what the one before it has left. Processes would each have their own.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from typing import Any

import torch

from tfstyle_dist.core.logging import warn_once

_NO_VALUE = object()
_MOST_WRAPPERS = 20
_known: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


class CarriedNames:
    """Says it, once, if a step function carries tensors from step to step in variables that all replicas share.

    Args:
        function: what ``run`` was given.
    """

    def __init__(self, function: Any) -> None:
        self._function = function = _own_code(function)
        names = _names_of(function.__code__) if isinstance(function, types.FunctionType) else ()
        self._before = [(name, self._value(name)) for name in names]

    def _value(self, name: str) -> Any:
        code = self._function.__code__
        if name not in code.co_freevars:
            return self._function.__globals__.get(name, _NO_VALUE)
        try:
            return self._function.__closure__[code.co_freevars.index(name)].cell_contents
        except ValueError:  # not bound yet
            return _NO_VALUE

    def say_carried(self) -> None:
        """After a run: names the variables that hold other tensors now."""
        for name, before in self._before:
            after = self._value(name)
            if after is before or not (_has_tensors(before) and _has_tensors(after)):
                continue
            where = self._function.__qualname__
            warn_once(
                f"carried {name} {where} {self._function.__code__.co_filename}",
                f"The step function {where} reads the variable {name!r} and then gives it another tensor. The replicas "
                "of one process share it, so each went on with what the one before it had left, and not with its own. "
                f"Return {name!r} from the step and give it to the next run as an argument, or keep it in an attribute "
                "of a module, or of an object that holds one (docs/replicas.md).",
            )


def _own_code(function: Any) -> Any:
    """What the program has written: within methods, partial calls and decorators, such as ``torch.no_grad()``."""
    for _ in range(_MOST_WRAPPERS):
        name = "func" if isinstance(function, functools.partial) else "__wrapped__"
        inner = getattr(function, name, None) or getattr(function, "__func__", None)
        if inner is None:
            break
        function = inner
    return function


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals and variables of a closure that the function reads first and writes to afterwards."""
    known = _known.get(code)
    if known is None:
        read: set[str] = set()
        carried: dict[str, None] = {}
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                read.add(name)
            elif instruction.opname == "STORE_GLOBAL" or (
                instruction.opname == "STORE_DEREF" and name in code.co_freevars
            ):
                carried.update(dict.fromkeys({name} & read))
        known = _known[code] = tuple(carried)
    return known
