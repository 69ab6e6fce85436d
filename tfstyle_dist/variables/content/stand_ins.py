"""Objects that have no ``__dict__`` that could be exchanged, and what stands for them: something that has one.

A stand-in holds its object, as nothing can refer to a dict or to most objects with slots weakly.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_FEW = 64
_MOST_KINDS = 256
_LEFT = 64


def find_slots(kind: type) -> Mapping[str, Any]:
    """The descriptors of a class by name, of what its objects have in ``__slots__``."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        for name, held in vars(one).items() if "__slots__" in vars(one) else ():
            if isinstance(held, types.MemberDescriptorType):  # a class may have one of the same name as its base
                found[name if name not in found else f"{name} {len(found)}"] = held
    return found


slots_of: Callable[[type], Mapping[str, Any]] = functools.lru_cache(_MOST_KINDS)(find_slots)
"""The same, and the class stays, with all that its methods name: for objects that are looked at in each run."""


def is_record(value: Any, among: int) -> bool:
    """Whether an object is data because it has slots, no ``__dict__``, and is one of many.

    Args:
        value: any object.
        among: how many are in the container that it is in.
    """
    return among > _FEW and not type(value).__dictoffset__ and bool(slots_of(type(value)))


def entries_of(value: Any) -> dict[str, Any]:
    """A dict itself; of a ``types.SimpleNamespace`` its names."""
    return value if issubclass(type(value), dict) else vars(value)  # type: ignore[no-any-return]


class StandIn:
    """Stands for an object: its ``__dict__`` is what that has in it.

    Attributes:
        same: the object, and what other replicas have in its place: the same.
        kind: its class; of a dict that holds the attributes of objects, theirs.
    """

    __slots__ = ("__weakref__", "_held", "kind", "same")

    def __init__(self, thing: Any, kind: type | None = None) -> None:
        self.same, self._held = (thing, thing), dict[str, Any]()
        self.kind = kind or type(thing)

    @property
    def __dict__(self) -> dict[str, Any]:
        """The same dict until another one is set, with what is in the object now."""
        return self.renewed()

    @__dict__.setter
    def __dict__(self, attributes: dict[str, Any]) -> None:
        self._write(attributes)
        self._held = attributes

    def renewed(self) -> dict[str, Any]:
        """Its ``__dict__``, for who has it and must see what was written since."""
        self._held.clear()
        self._held.update(self._read())
        return self._held

    @property
    def is_alone(self) -> bool:
        """Whether nobody else holds the object."""
        thing = self.same[0]
        own = getattr(type(thing), "__dictoffset__", 0) and object.__getattribute__(thing, "__dict__") is thing
        return sys.getrefcount(thing) - bool(own) <= _ALONE

    def _read(self) -> Iterable[tuple[str, Any]]:
        raise NotImplementedError

    def _write(self, attributes: Mapping[str, Any]) -> None:
        raise NotImplementedError


def meant_by(thing: Any) -> Any:
    """The object that a stand-in stands for; any other one is meant itself."""
    return thing.same[0] if isinstance(thing, StandIn) else thing


def class_of(thing: Any) -> type:
    """The class of an object, or of the one that a stand-in stands for."""
    return thing.kind if isinstance(thing, StandIn) else type(thing)


def set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Gives an object these: its own, where they were written to; those of what a stand-in stands for are written."""
    object.__setattr__(thing, "__dict__", attributes)


class Entries(StandIn):
    """Stands for a dict or a namespace: its attributes are what is in that."""

    __slots__ = ()

    def _read(self) -> Iterable[tuple[str, Any]]:
        box = entries_of(self.same[0])
        return _kind_of(box).items(box)  # type: ignore[no-any-return]

    def _write(self, attributes: Mapping[str, Any]) -> None:
        """Who iterates over the dict meanwhile goes on if the keys are the same."""
        box = entries_of(self.same[0])
        kind = _kind_of(box)
        if list(kind.keys(box)) != list(attributes):
            kind.clear(box)
        for name, value in attributes.items():
            if dict.get(box, name, box) is not value:
                kind.__setitem__(box, name, value)


def _kind_of(box: dict[str, Any]) -> Any:
    """Whose methods know its entries: an ``OrderedDict`` has an order of its own."""
    return OrderedDict if isinstance(box, OrderedDict) else dict


class Slots(StandIn):
    """Stands for an object whose attributes are in ``__slots__``."""

    __slots__ = ("_slots",)

    def __init__(self, thing: Any) -> None:
        super().__init__(thing)
        self._slots = slots_of(type(thing))

    def _read(self) -> Iterator[tuple[str, Any]]:
        thing = self.same[0]
        for name, slot in self._slots.items():
            try:
                yield name, slot.__get__(thing)
            except AttributeError:  # nothing
                continue

    def _write(self, attributes: Mapping[str, Any]) -> None:
        thing = self.same[0]
        for name, slot in self._slots.items():
            if name in attributes:
                slot.__set__(thing, attributes[name])
            else:
                with contextlib.suppress(AttributeError):  # nothing was there
                    slot.__delete__(thing)


class SlotsBeside(Slots):
    """Stands for what an object has in ``__slots__`` beside its ``__dict__``, and does not keep it."""

    __slots__ = ("_reference",)

    def __init__(self, thing: Any) -> None:
        self._reference, self._held, self.kind = weakref.ref(thing), {}, type(thing)
        self._slots = find_slots(self.kind)

    @property
    def same(self) -> tuple[Any, Any]:  # type: ignore[override]
        """The object, twice."""
        thing = self._reference()
        return thing, thing

    @property
    def is_alone(self) -> bool:
        """Whether the object is gone."""
        return self._reference() is None


class WeakEntries(StandIn):
    """Stands for a ``weakref.WeakKeyDictionary``: a key that is gone takes its entry from every replica, and no more.

    Its own dict is of no use for that: a key that is gone leaves that of the replica whose turn it is.
    """

    __slots__ = ("_keys", "_names", "_numbers")

    def __init__(self, thing: Any) -> None:
        super().__init__(thing)
        self._numbers = itertools.count()
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._keys: dict[str, weakref.ref[Any]] = {}

    def _read(self) -> Iterator[tuple[str, Any]]:
        for key, value in list(self.same[0].items()):
            if (name := self._names.get(key)) is None:
                name = self._names[key] = str(next(self._numbers))
                self._keys[name] = weakref.ref(key)
            yield name, value
        if len(self._keys) > 2 * len(self._names) + _LEFT:
            self._keys = {name: key for name, key in self._keys.items() if key() is not None}

    def _write(self, attributes: Mapping[str, Any]) -> None:
        box, had = self.same[0], dict(self._read())
        for name in had.keys() - attributes.keys():
            if (key := self._key(name)) is not None:
                box.pop(key, None)
        for name, value in attributes.items():
            if had.get(name, had) is not value and (key := self._key(name)) is not None:
                box[key] = value

    def _key(self, name: str) -> Any:
        reference = self._keys.get(name)
        return None if reference is None else reference()


def _references(stand_in: StandIn) -> int:
    thing = stand_in.same[0]
    return sys.getrefcount(thing)


_ALONE = _references(Entries(types.SimpleNamespace()))
