"""Variables of a program that a step reads and then gives another tensor, as the hidden state of a recurrent network.

``global hidden`` or ``nonlocal hidden`` in a step, or in a function that it names: the replicas of one process share
the variable, so each goes on with what the one before it has left. Processes would each have their own. A number that
steps count goes on once for each replica. So it is with an entry of a dict (``settings["calls"] += 1``) and with an
attribute of a function (``forward.calls += 1``).
"""

from __future__ import annotations

import dis
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.content.copies import DICTS


class Inside(NamedTuple):
    """A place in what a variable holds.

    Attributes:
        name: of the variable.
        key: of an entry of its dict; the name of an attribute of its function.
        is_entry: which of the two.
    """

    name: str
    key: Any
    is_entry: bool

    def __str__(self) -> str:
        return f"{self.name}[{self.key!r}]" if self.is_entry else f"{self.name}.{self.key}"


Place = str | Inside
"""The name of a variable, or a place in what it holds."""
Carrying = tuple[types.FunctionType, tuple[Place, ...]]
"""A function, and what ``carried_in`` gives for it."""
_NO_VALUE = object()
_LOADS = "LOAD_GLOBAL", "LOAD_DEREF"
_KEYS = "LOAD_CONST", "LOAD_SMALL_INT"
_LEFT_OUT = "EXTENDED_ARG", "NOP", "PUSH_NULL"


class CarriedNames:
    """Says it, once, if functions carry tensors or numbers from step to step in variables that all replicas share.

    Args:
        functions: of the program.
        own: by ``id`` what each replica has its own content of.
    """

    def __init__(self, functions: Iterable[Carrying], own: Container[int] = ()) -> None:
        self._before = [
            (function, name, _value(function, name))
            for function, names in functions
            for name in names
            if isinstance(name, str) or id(_value(function, name.name)) not in own
        ]
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
            where, called = function.__qualname__, repr(str(name))
            warn_once(
                f"carried {name} {where} {function.__code__.co_filename}",
                f"The function {where} reads the variable {called} and then gives it another tensor. The replicas "
                "of one process share it, so each went on with what the one before it had left, and not with its own. "
                f"Return {called} from the step and give it to the next run as an argument, or keep it in an attribute "
                "of a module, or of an object that holds one (docs/replicas.md).",
            )


class _Number:
    """A variable that holds a number: what it held and holds, and the replicas that have changed it."""

    __slots__ = ("before", "function", "name", "now", "replicas")

    def __init__(self, function: types.FunctionType, name: Place, value: Any) -> None:
        self.function, self.name, self.before, self.now = function, name, value, value
        self.replicas: set[int] = set()

    def has_changed(self) -> bool:
        """Whether it holds another value than when this was asked last."""
        before, self.now = self.now, _value(self.function, self.name)
        if _is_number(before) and _is_number(self.now):
            return bool(self.now != before)
        return self.now is not before


def _say_counted(number: _Number) -> None:
    where, name = number.function.__qualname__, str(number.name)
    variable = number.name.name if isinstance(number.name, Inside) else name  # once for all entries of a dict
    warn_once(
        f"counted {variable} {where} {number.function.__code__.co_filename}",
        f"The function {where} reads the variable {name!r} and then gives it another number. The replicas of one "
        f"process share it, so it went on once for each of {len(number.replicas)} replicas in one run, from "
        f"{number.before} to {number.now}. Where a learning rate, a weight of the loss or the like is made of it, keep "
        "it in an attribute of a module, or of an object that holds the model and the optimizer, or count outside of "
        "strategy.run (docs/replicas.md).",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(function: types.FunctionType, place: Place) -> Any:
    if isinstance(place, Inside):
        held = _value(function, place.name)
        if place.is_entry:
            return dict.get(held, place.key, _NO_VALUE) if type(held) in DICTS else _NO_VALUE
        return vars(held).get(place.key, _NO_VALUE) if isinstance(held, types.FunctionType) else _NO_VALUE
    code = function.__code__
    if place not in code.co_freevars:
        return function.__globals__.get(place, _NO_VALUE)
    try:
        return (function.__closure__ or ())[code.co_freevars.index(place)].cell_contents
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


def carried_in(code: types.CodeType) -> tuple[Place, ...]:
    """The globals and variables of a closure that a function reads first and writes to afterwards, and places in them.

    Args:
        code: of the function; those that are defined in it count too.
    """
    carried: dict[Place, None] = {}
    for one in with_inner(code):
        read: set[Place] = set()
        shared = {*one.co_names, *(name for name in one.co_freevars if name in code.co_freevars)}
        for place, is_read, is_written in _uses(one):
            if is_read:
                read.add(place)
            if is_written and place in read and (place if isinstance(place, str) else place.name) in shared:
                carried[place] = None
    return tuple(carried)


def _uses(code: types.CodeType) -> Iterator[tuple[Place, bool, bool]]:
    """Whether a place is read and written there; ``settings["calls"] += 1`` does both."""
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _LEFT_OUT]
    names = [one.opname for one in instructions] + [""] * 2
    values = [one.argval for one in instructions] + [None] * 2
    for number, name in enumerate(values[:-2]):
        opcode, then, last = names[number : number + 3]
        if opcode in ("STORE_GLOBAL", "STORE_DEREF"):
            yield name, False, True
        if opcode not in _LOADS:
            continue
        yield name, True, False
        if then in _KEYS:
            entry = Inside(name, values[number + 1], is_entry=True)
            yield entry, last in ("COPY", "BINARY_SUBSCR", "BINARY_OP"), last in ("COPY", "STORE_SUBSCR")
        elif last in _KEYS and values[number + 1] == "get":
            yield Inside(name, values[number + 2], is_entry=True), True, False
        elif then in ("LOAD_ATTR", "STORE_ATTR"):
            yield Inside(name, values[number + 1], is_entry=False), then == "LOAD_ATTR", then == "STORE_ATTR"
        elif (then, last) == ("COPY", "LOAD_ATTR"):
            yield Inside(name, values[number + 2], is_entry=False), True, True
