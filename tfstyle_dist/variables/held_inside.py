"""What is inside of objects that stay, and is exchanged: elements of arrays, entries of a trainer's dict, slots.

A dict and a ``types.SimpleNamespace`` have no attributes that could be exchanged. All replicas begin with the same
entries, and each goes on from there.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.runtime.random_streams import is_of_the_streams
from tfstyle_dist.variables.copies import ATOMS, DICTS, is_container
from tfstyle_dist.variables.generator_states import GeneratorStates
from tfstyle_dist.variables.object_content import ObjectContent, when_gone
from tfstyle_dist.variables.own_arrays import OwnArrays, is_common, is_own_array
from tfstyle_dist.variables.stand_ins import StandIn
from tfstyle_dist.variables.state_objects import (
    FEW,
    HOLDERS,
    MOST_LOOKED_AT,
    Belongs,
    belongings,
    is_helper,
    is_optimizer,
    parts_of,
    stand_in_for,
)

_SPACES = (dict, types.SimpleNamespace)


def has_entries(value: Any, part: Belongs) -> bool:
    """Whether this is a dict or a namespace whose entries count as the attributes of an object do.

    A dict does if a module, an optimizer or the like is in it, or in a short container in it; one whose entries are
    read as attributes, and a ``types.SimpleNamespace``, as an object of a class of the program's would.

    Args:
        value: anything.
        part: what it was found in.
    """
    if not issubclass(type(value), _SPACES):
        return False
    held = _inside(value)
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
        counts = part is Belongs.PART or is_helper(held)
    return counts and not any(map(is_common, values))


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


def _inside(value: Any) -> dict[str, Any]:
    return value if issubclass(type(value), dict) else vars(value)  # type: ignore[no-any-return]


class Entries:
    """Stands for a dict or a namespace: what is in it are the attributes of this one.

    Attributes:
        same: the dict or the namespace, and what other replicas have in its place: the same.
    """

    __slots__ = ("__dict__", "__weakref__", "same")

    def __init__(self, box: Any) -> None:
        self.same, self.__dict__ = (box, box), _inside(box)


class HeldInside:
    """The generators, arrays, dicts, namespaces and objects without a ``__dict__`` that are content.

    Nothing can refer to dicts and namespaces weakly, nor to most objects with slots: these are held as long as others
    hold them.

    Args:
        count: of the replicas.
        places: what is content, by ``id``.
        take: makes the attributes of an object content, and those of what it has, which belong to what is said.
        let_go: called with the ``id`` of what is gone.

    Attributes:
        generators: their states.
        same: of the last three what other replicas have in their place, by ``id``: the same.
    """

    def __init__(
        self,
        count: int,
        places: dict[int, Any],
        take: Callable[[Any, Belongs], None],
        let_go: Callable[[int], None],
    ) -> None:
        self._count, self._places, self._take, self._let_go = count, places, take, let_go
        self.generators, self._arrays = GeneratorStates(), OwnArrays(let_go)
        self._entries: dict[int, tuple[Entries, ObjectContent]] = {}  # by the ``id`` of the dict or namespace
        self._stand_ins: dict[int, StandIn] = {}  # by that of the object; exchanged as other objects are
        self.same: dict[int, tuple[Any, Any]] = {}

    def take(self, value: Any, part: Belongs, generators_alone: bool) -> bool:
        """Exchanges what is inside of an object from now on; returns whether something is.

        Args:
            value: any object.
            part: what it was found in.
            generators_alone: all else is as it is for any object, as in elastic jobs, where it is a worker's.
        """
        if isinstance(value, torch.Generator):
            if not is_of_the_streams(value):
                self.generators.add(value, self._count, when_gone(self._let_go, id(value)))
                self._places[id(value)] = True
            return True
        if generators_alone:
            return False
        if is_own_array(value):
            self._arrays.add(value, self._count)
        elif has_entries(value, part):
            self.same[id(value)] = (entries := Entries(value)).same
            self._take(entries, max(part, belongings(entries)))
            self._entries[id(value)] = entries, self._places[id(entries)]
        elif (stand_in := stand_in_for(value, part)) is not None:
            self.same[id(value)], self._stand_ins[id(value)] = stand_in.same, stand_in
            self._take(stand_in, max(part, belongings(stand_in)))
        else:
            return False
        self._places[id(value)] = True
        return True

    def switch(self, before: int, after: int) -> None:
        """All have what replica ``before`` has made of them; they get that of ``after``."""
        self.generators.switch(before, after)
        if self._arrays.kept:
            self._arrays.switch(before, after)
        for entries, content in self._entries.values():
            box = _inside(entries.same[0])
            kind = _kind_of(box)
            content.dicts[before] = kind(kind.items(box))
            _put(box, entries.__dict__)
            entries.__dict__ = content.dicts[after] = box

    def renew(self, everything: bool) -> None:
        """What cross-replica context has changed is as it left it; entries are compared as attributes are.

        Args:
            everything: all is.
        """
        self.generators.renew(everything)
        if self._arrays.kept:
            self._arrays.renew(everything)

    def mark(self) -> None:
        """Remembers all as it is."""
        self.generators.mark()
        if self._arrays.kept:
            self._arrays.mark()

    def drop_dead(self) -> None:
        """Forgets what is gone, and what nobody holds but this object."""
        self.generators.drop_dead()
        if self._arrays.kept:
            self._arrays.drop_dead()
        while gone := [n for n, (entries, _) in self._entries.items() if _references(entries) <= _ALONE]:
            for number in gone:
                del self._entries[number], self._places[number], self.same[number]
        while gone := [n for n, held in self._stand_ins.items() if _references(held) <= _ALONE]:
            for number in gone:
                del self._stand_ins[number], self._places[number], self.same[number]

    def clear(self) -> None:
        """Nobody asks for what this holds any more."""
        for number in [*self._entries, *self._stand_ins, *(id(kept.array) for kept in self._arrays.kept)]:
            del self._places[number]
        self._entries.clear()
        self._stand_ins.clear()
        self._arrays.kept = []
        self.same.clear()


def _put(box: dict[str, Any], entries: dict[str, Any]) -> None:
    """Gives a dict other entries; who iterates over it meanwhile goes on if the keys are the same."""
    kind = _kind_of(box)
    if list(kind.keys(box)) != list(entries):
        kind.clear(box)
    for name, value in entries.items():
        if dict.get(box, name, box) is not value:
            kind.__setitem__(box, name, value)


def _kind_of(box: dict[str, Any]) -> Any:
    """Whose methods know its entries: an ``OrderedDict`` has an order of its own."""
    return OrderedDict if isinstance(box, OrderedDict) else dict


def _references(holder: Entries | StandIn) -> int:
    """To what one stands for; a dict is the attributes too, of the replica that is shown, and perhaps its own."""
    box = holder.same[0]
    if isinstance(holder, StandIn):
        return sys.getrefcount(box)
    own = getattr(type(box), "__dictoffset__", 0) and object.__getattribute__(box, "__dict__") is box
    return sys.getrefcount(box) - 2 * (box is holder.__dict__) - bool(own)


_ALONE = _references(Entries(types.SimpleNamespace()))
