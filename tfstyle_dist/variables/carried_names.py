"""Variables of a program that a step reads and then gives another tensor, as the hidden state of a recurrent network.

``global hidden`` or ``nonlocal hidden`` in a step, or in a function that it names: the replicas of one process share
the variable, so each goes on with what the one before it has left. Processes would each have their own. A number that
steps count goes on once for each replica.
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
    """Says it, once, if functions carry tensors or numbers from step to step in variables that all replicas share.

    Args:
        functions: of the program.
    """

    def __init__(self, functions: Iterable[Carrying]) -> None:
        self._before = [(function, name, _value(function, name)) for function, names in functions for name in names]
        self._numbers = [_Number(*found) for found in self._before if _is_number(found[2])]

    def note(self, replica: int) -> None:
        """A replica's turn ends: it is this one that has changed what is other than it was."""
        for number in self._numbers:
            if number.has_changed():
                number.replicas.add(replica)

    def pass_over(self) -> None:
        """What is other than it was was changed in cross-replica context."""
        self._before = [(function, name, _value(function, name)) for function, name, _ in self._before]
        for number in self._numbers:
            number.has_changed()

    def say_carried(self) -> None:
        """Names the variables that hold other tensors now, and those of numbers that went on in several replicas."""
        for number in self._numbers:
            if len(number.replicas) > 1 and _is_number(number.now):
                _say_counted(number)
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


class _Number:
    """A variable that holds a number: what it held and holds, and the replicas that have changed it."""

    __slots__ = ("before", "function", "name", "now", "replicas")

    def __init__(self, function: types.FunctionType, name: str, value: Any) -> None:
        self.function, self.name, self.before, self.now = function, name, value, value
        self.replicas: set[int] = set()

    def has_changed(self) -> bool:
        """Whether it holds another value than when this was asked last."""
        before, self.now = self.now, _value(self.function, self.name)
        if _is_number(before) and _is_number(self.now):
            return bool(self.now != before)
        return self.now is not before


def _say_counted(number: _Number) -> None:
    where, name = number.function.__qualname__, number.name
    warn_once(
        f"counted {name} {where} {number.function.__code__.co_filename}",
        f"The function {where} reads the variable {name!r} and then gives it another number. The replicas of one "
        f"process share it, so it went on once for each of {len(number.replicas)} replicas in one run, from "
        f"{number.before} to {number.now}. Where a learning rate, a weight of the loss or the like is made of it, keep "
        "it in an attribute of a module, or of an object that holds the model and the optimizer, or count outside of "
        "strategy.run (docs/replicas.md).",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
