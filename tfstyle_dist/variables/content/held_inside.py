"""What is inside of objects that stay, and is exchanged: elements, random streams, entries of a trainer's dict, slots.

A dict and a ``types.SimpleNamespace`` have no attributes that could be exchanged. All replicas begin with the same
entries, and each goes on from there.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.runtime.random_streams import is_of_the_streams
from tfstyle_dist.variables.content.copies import ATOMS, DICTS, is_container
from tfstyle_dist.variables.content.inner_states import InnerStates, has_inner_state, is_common
from tfstyle_dist.variables.content.stand_ins import Entries, SlotsBeside, StandIn, entries_of, find_slots
from tfstyle_dist.variables.content.state_objects import (
    FEW,
    HOLDERS,
    MOST_LOOKED_AT,
    Belongs,
    belongings,
    is_helper,
    is_optimizer,
    is_state,
    parts_of,
    slotted,
)

_SPACES = (dict, types.SimpleNamespace)


def stand_in_for(value: Any, part: Belongs, arrays: bool = True) -> StandIn | None:
    """What stands for an object that is content, as a plain one would be, if its attributes cannot be exchanged.

    It has none, or its class has them for all of its objects (``self.__dict__ = cls._state``); then their dict is what
    is stood for. ``None`` for all other objects.

    Args:
        value: any object.
        part: what it was found in.
        arrays: whether replicas have elements of their own in small arrays, and streams of random numbers.
    """
    if has_entries(value, part, arrays):
        return Entries(value)
    if (stand_in := slotted(value, part, arrays)) is not None:
        return stand_in
    in_class = _class_has_attributes_of(value) and is_state(value, part, arrays)
    return Entries(value.__dict__, type(value)) if in_class else None


def _class_has_attributes_of(value: Any) -> bool:
    kind = type(value)
    if not kind.__dictoffset__ or isinstance(value, HOLDERS):
        return False
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # a class of C's, as that of asyncio's futures
        return False
    return any(held is attributes for one in kind.__mro__ for held in list(vars(one).values()))


def has_entries(value: Any, part: Belongs, arrays: bool = True) -> bool:
    """Whether this is a dict or a namespace whose entries count as the attributes of an object do.

    A dict does if a module, an optimizer or the like is in it, or in a short container in it; one whose entries are
    read as attributes, and a ``types.SimpleNamespace``, as an object of a class of the program's would.

    Args:
        value: anything.
        part: what it was found in.
        arrays: as above.
    """
    if not issubclass(type(value), _SPACES):
        return False
    held = entries_of(value)
    if dict.__len__(held) > MOST_LOOKED_AT or not all(type(name) is str for name in dict.keys(held)):
        return False
    if "__builtins__" in held:  # the globals of a program
        return False
    values = list(dict.values(held))
    if any(map(_is_or_has_holder, values)):
        counts = type(value) in DICTS or _is_namespace(value)
    elif part is Belongs.NOTHING or not _is_namespace(value):
        return False
    else:
        counts = part is Belongs.PART or is_helper(held, arrays)
    return counts and not any(is_common(one, arrays) for one in values)


def _is_or_has_holder(value: Any, depth: int = 2) -> bool:
    kind = type(value)
    if kind in ATOMS or issubclass(kind, torch.Tensor):
        return False
    if is_container(value) or kind is tuple:
        return depth > 0 and any(_is_or_has_holder(part, depth - 1) for part in parts_of(value, FEW))
    return issubclass(kind, HOLDERS) or is_optimizer(kind)


def _is_namespace(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, types.SimpleNamespace):
        return True
    if kind in DICTS or not kind.__dictoffset__:
        return False
    attributes = object.__getattribute__(value, "__dict__")
    return attributes is value or (hasattr(kind, "__getattr__") and not attributes)


class HeldInside(InnerStates):
    """The generators, arrays, dicts, namespaces and objects without a ``__dict__`` that are content.

    Nothing can refer to dicts and namespaces weakly, nor to most objects with slots: these are held as long as others
    hold them. Their entries are compared, and exchanged, as attributes of other objects are.

    Args:
        count: of the replicas.
        places: what is content, by ``id``.
        take: makes the attributes of an object content, and those of what it has, which belong to what is said.
        let_go: called with the ``id`` of what is gone.

    Attributes:
        same: what other replicas have in their place, by ``id``: the same.
    """

    def __init__(
        self,
        count: int,
        places: dict[int, Any],
        take: Callable[[Any, Belongs], None],
        let_go: Callable[[int], None],
    ) -> None:
        super().__init__(self._forget)
        self._count, self._places, self._take, self._tell = count, places, take, let_go
        self._stand_ins: dict[int, StandIn] = {}  # by the ``id`` of the object; exchanged as other objects are
        self.same: dict[int, tuple[Any, Any]] = {}

    def take(self, value: Any, part: Belongs, arrays: bool) -> bool:
        """Exchanges what is inside of an object from now on; returns whether something is.

        Args:
            value: any object.
            part: what it was found in.
            arrays: whether replicas have elements of their own in small arrays, and streams of random numbers.
        """
        of_torch = isinstance(value, torch.Generator)
        if of_torch and is_of_the_streams(value):
            return True
        if of_torch or (arrays and has_inner_state(value)):
            self.same[id(value)] = self.add(value, self._count)
        elif (stand_in := stand_in_for(value, part, arrays)) is not None:
            value = stand_in.same[0]
            if id(value) in self._places:  # attributes that another object has too
                return True
            self.same[id(value)], self._stand_ins[id(value)] = stand_in.same, stand_in
            self._take(stand_in, max(part, belongings(stand_in)))
        else:
            return False
        self._places[id(value)] = True
        return True

    def take_beside(self, value: Any, parts: Belongs) -> None:
        """Exchanges what an object has in ``__slots__``, whose other attributes are content.

        Args:
            value: the object.
            parts: what its attributes are.
        """
        if type(value).__dictoffset__ and find_slots(type(value)):
            stand_in = SlotsBeside(value)
            self._stand_ins[id(stand_in)], self.same[id(stand_in)] = stand_in, (stand_in, stand_in)
            self._take(stand_in, parts)

    def _forget(self, number: int) -> None:
        self.same.pop(number, None)
        self._tell(number)

    def drop_dead(self) -> None:
        """Forgets what nobody holds but this object."""
        super().drop_dead()
        while gone := [number for number, stand_in in self._stand_ins.items() if stand_in.is_alone]:
            for number in gone:
                del self._stand_ins[number], self._places[number], self.same[number]

    def clear(self) -> None:
        """Nobody asks for what this holds any more."""
        for number in [*self._stand_ins, *(id(kept.value) for kept in self.kept)]:
            del self._places[number]
        self._stand_ins.clear()
        self.kept = []
        self.same.clear()
