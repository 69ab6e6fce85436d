"""Variables of a program that a step reads and then gives another tensor, as the hidden state of a recurrent network.

``global hidden`` or ``nonlocal hidden`` in a step, or in a function that it names: the replicas of one process share
the variable, so each goes on with what the one before it has left. Processes would each have their own.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tfstyle_dist.core.logging import warn_once

Carrying = tuple[types.FunctionType, tuple[str, ...]]
"""A function, and what ``carried_in`` gives for it."""
_NO_VALUE = object()


class CarriedNames:
    """Says it, once, if functions carry tensors from step to step in variables that all replicas share.

    Args:
        functions: of the program.
    """

    def __init__(self, functions: Iterable[Carrying]) -> None:
        self._before = [(function, name, _value(function, name)) for function, names in functions for name in names]

    def say_carried(self) -> None:
        """After a run: names the variables that hold other tensors now."""
        for function, name, before in self._before:
            after = _value(function, name)
            if after is before or not (_has_tensors(before) and _has_tensors(after)):
                continue
            where = function.__qualname__
            warn_once(
                f"carried {name} {where} {function.__code__.co_filename}",
                f"The function {where} reads the variable {name!r} and then gives it another tensor. The replicas "
                "of one process share it, so each went on with what the one before it had left, and not with its own. "
                f"Return {name!r} from the step and give it to the next run as an argument, or keep it in an attribute "
                "of a module, or of an object that holds one (docs/replicas.md).",
            )


def _value(function: types.FunctionType, name: str) -> Any:
    code = function.__code__
    if name not in code.co_freevars:
        return function.__globals__.get(name, _NO_VALUE)
    try:
        return (function.__closure__ or ())[code.co_freevars.index(name)].cell_contents
    except ValueError:  # not bound yet
        return _NO_VALUE


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of what is defined in it."""
    stack = [code]
    while stack:
        yield (one := stack.pop())
        stack += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]


def carried_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals and variables of a closure that a function reads first and writes to afterwards.

    Args:
        code: of the function; those that are defined in it count too.
    """
    carried: dict[str, None] = {}
    for one in with_inner(code):
        read: set[str] = set()
        for instruction in dis.get_instructions(one):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                read.add(name)
            elif instruction.opname == "STORE_GLOBAL" or (
                instruction.opname == "STORE_DEREF" and name in one.co_freevars and name in code.co_freevars
            ):
                carried.update(dict.fromkeys({name} & read))
    return tuple(carried)
