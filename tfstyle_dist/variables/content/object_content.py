"""The attributes of one object for each replica, and a cheap way to see what was written to them."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.content.copies import CONTAINERS, MOST_ENTRIES, PLAIN_TENSORS, is_container
from tfstyle_dist.variables.content.marks import Mark, TensorMarks


class ObjectContent:
    """An object whose attributes are content.

    Attributes:
        dicts: the attributes for each replica; that of the replica whose turn it is may be old.
        number: place in the order in which objects were taken.
        fresh: the attributes that were other objects when it was marked; whoever has looked at them empties it.
        own: the attributes that are never copied, whatever is written to them: each replica's are its own.
        boxes: the containers among the other attributes.
        deep: the marks of containers that are not empty, and of tensors.
    """

    __slots__ = ("_keys", "_sizes", "_values", "boxes", "deep", "dicts", "fresh", "number", "own", "reference")

    def __init__(self, thing: Any, dicts: list[dict[str, Any]], gone: Callable[[Any], None], number: int = 0) -> None:
        self.reference: Callable[[], Any] = weakref.ref(thing, gone)
        self.dicts, self.number = dicts, number
        self._keys: list[str] = []
        self._values: list[Any] = []
        self.boxes: list[Any] = []
        self._sizes: list[int] = []
        self.deep: list[Mark] = []
        self.fresh: Sequence[str] = ()
        self.own: frozenset[str] = frozenset()

    def clear(self) -> None:
        """The object is gone, or nobody asks for its attributes any more."""
        self.dicts, self._values, self.deep, self.boxes = [], [], [], []

    def alone(self, name: str, reference: Callable[[], Any]) -> ObjectContent:
        """The content of one attribute, as it was marked, of what ``reference`` gives."""
        part = copy.copy(self)
        part.reference, part.fresh, part.own = reference, (), frozenset()
        part.dicts = [{name: attributes[name]} if name in attributes else {} for attributes in self.dicts]
        part._forget_others(name)
        return part

    def _forget_others(self, name: str) -> None:
        known = dict(zip(self._keys, self._values, strict=True))
        self._keys, self._values = ([name], [known[name]]) if name in known else ([], [])
        sizes = [(box, size) for box, size in zip(self.boxes, self._sizes, strict=True) if box is known.get(name)]
        self.boxes, self._sizes = [box for box, _ in sizes], [size for _, size in sizes]
        self.deep = [mark for mark in self.deep if mark.value is known.get(name)]

    def mark(self, now: dict[str, Any], tensors: bool = True) -> None:
        """Remembers replica 0's attributes as they are; ``tensors``: see ``Mark.renew``."""
        others = not self._has_same_attributes(now)
        same_sizes = list(map(len, self.boxes)) == self._sizes
        if not others and same_sizes and all(m.same() for m in self.deep):
            return
        old = dict(zip(self._keys, self._values, strict=True))
        written = {id(m.value) for m in self.deep if not m.has_same_entries()}
        if not same_sizes:
            written |= {id(box) for box, size in zip(self.boxes, self._sizes, strict=True) if len(box) != size}
        if not others and not written:
            for mark in self.deep:
                mark.renew(tensors=tensors)
            return
        self.fresh = [name for name, v in now.items() if v is not old.get(name) or id(v) in written]
        copied = [v for name, v in now.items() if name not in self.own]
        if others:
            self._keys, self._values = list(now), list(now.values())
            self.boxes = [v for v in copied if is_container(v)]
        self._sizes = list(map(len, self.boxes))
        known = {id(mark.value): mark for mark in self.deep}
        self.deep = [
            _renewed(known.get(id(v)), v, tensors)
            for v in copied
            if type(v) in PLAIN_TENSORS or (is_container(v) and (len(v) or type(v) not in CONTAINERS))
        ]

    def same(self, now: dict[str, Any]) -> bool:
        """Whether replica 0's attributes are as they were marked."""
        same_sizes = list(map(len, self.boxes)) == self._sizes
        return self._has_same_attributes(now) and same_sizes and all(m.same() for m in self.deep)

    def _has_same_attributes(self, now: dict[str, Any]) -> bool:
        same_values = len(now) == len(self._keys) and all(map(is_, now.values(), self._values))
        return same_values and all(map(is_, now, self._keys))

    def changes(self, now: dict[str, Any]) -> tuple[list[str], list[str]]:
        """The attributes that are other ones, or were written to; and those that are gone. None of ``own``."""
        marks = {id(m.value): m for m in self.deep}
        old = dict(zip(self._keys, self._values, strict=True))
        sizes = {id(b): s for b, s in zip(self.boxes, self._sizes, strict=True)}
        written = []
        for name, value in now.items():
            if name in self.own:
                continue
            known = name in old and value is old[name]
            mark = marks.get(id(value))
            if known and (id(value) not in sizes or len(value) == sizes[id(value)]) and (mark is None or mark.same()):
                continue
            written.append(name)
        return written, [name for name in old if name not in now]

    def marks(self) -> Iterator[tuple[str, Any, Mark | None]]:
        """Each attribute but ``own`` with what it was, and the mark of its contents if it has any."""
        by_id = {id(m.value): m for m in self.deep}
        for name, value in zip(self._keys, self._values, strict=True):
            if name not in self.own:
                yield name, value, by_id.get(id(value))


class AllObjects:
    """The attributes of all objects at once: mostly nothing was written to, and that is seen in few calls.

    Args:
        things: the objects with their contents, just marked.
    """

    def __init__(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        dicts = [thing.__dict__ for thing, _ in things]
        self._counts = list(map(len, dicts))
        self._keys = list(chain.from_iterable(dicts))
        self._values = list(chain.from_iterable(map(dict.values, dicts)))
        self._boxes = [box for _, content in things for box in content.boxes]
        self._sizes = list(map(len, self._boxes))
        deep = [mark for _, content in things for mark in content.deep]
        # What the marks compare, so that few calls of C compare all of it.
        inner: list[Mark] = []
        tensors = [mark for mark in deep if isinstance(mark.value, torch.Tensor)]
        stack = [mark for mark in deep if not isinstance(mark.value, torch.Tensor)]
        while stack:
            mark = stack.pop()
            inner.append(mark)
            for part in mark.parts():
                (tensors if isinstance(part.value, torch.Tensor) else stack).append(part)
        self._tensors = TensorMarks(tensors)
        self._inner = [mark.value for mark in inner]
        self._inner_sizes = list(map(len, self._inner))
        self.data = [box for box, size in zip(self._inner, self._inner_sizes, strict=True) if size > MOST_ENTRIES]
        looked_into = [mark.value for mark in inner if mark.looks_inside]
        self._mappings = [value for value in looked_into if isinstance(value, dict)]
        self._sequences = [value for value in looked_into if not isinstance(value, dict)]
        self._inner_keys = list(chain.from_iterable(self._mappings))
        self._inner_values = list(self._entries())

    def _entries(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self._mappings)), chain.from_iterable(self._sequences))

    def have_same_attributes(self, things: Sequence[tuple[Any, ObjectContent]]) -> bool:
        """Whether all attributes are the same objects; tensors, and containers within, may have been written to."""
        dicts = [thing.__dict__ for thing, _ in things]
        return (
            list(map(len, dicts)) == self._counts
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), self._values))
            and list(chain.from_iterable(dicts)) == self._keys
            and list(map(len, self._boxes)) == self._sizes
        )

    def have_same_entries(self) -> bool:
        """Whether the containers among the attributes hold the same objects; tensors may have been written to."""
        return (
            list(map(len, self._inner)) == self._inner_sizes
            and all(map(is_, self._entries(), self._inner_values))
            and all(map(is_, chain.from_iterable(self._mappings), self._inner_keys))
        )

    def are_same(self, things: Sequence[tuple[Any, ObjectContent]]) -> bool:
        """Whether nothing was written to any attribute."""
        return self.have_same_attributes(things) and self.have_same_entries() and self._tensors.same()

    def renew(self) -> None:
        """Remembers what was written to tensors."""
        self._tensors.renew()


class ObjectMarks:
    """What the attributes of all objects were; seen in few calls as long as nothing was written to."""

    def __init__(self) -> None:
        self._all: AllObjects | None = None
        self._data: list[tuple[Any, tuple[int, Any]]] = []  # too long to be state; its end when the run began
        self._kinds: list[type] = []

    def note_kinds(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        """A run begins, or goes on after joint work, with these objects."""
        self._kinds = [type(thing) for thing, _ in things]

    def begin(self) -> None:
        """A run begins."""
        self._data = [] if self._all is None else [(box, _end_of(box)) for box in self._all.data]

    def say_changed(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        """Says it, once, where a step changed what replicas share; ``things``: those of the run, and new ones."""
        self._say_changed_data(things)
        self._say_changed_kinds(things)

    def _say_changed_kinds(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        """Where a step gave another class to an object."""
        for (thing, _), kind in zip(things, self._kinds, strict=False):
            if type(thing) is not kind:
                warn_once(
                    f"class {kind.__qualname__}",
                    f"A step made an object of the class {kind.__qualname__} one of the class "
                    f"{type(thing).__qualname__}. An object has one class for all replicas of a process: from then on "
                    "the others found the new one too, also in the step in which processes would still have the old "
                    "one. Keep what changes in an attribute, such as self.state = Trained(), or set the class outside "
                    "of strategy.run (docs/replicas.md).",
                )
        self._kinds = []

    def _say_changed_data(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        """Where a step added to a container that the replicas share, because it is that long."""
        changed = {id(box): size for box, (size, last) in self._data if _end_of(box) != (size, last)}
        self._data = []
        for thing, content in things if changed else ():
            for name, value in thing.__dict__.items():
                shared = name not in content.own and all(own.get(name) is value for own in content.dicts)
                if shared and id(value) in changed:
                    warn_once(
                        f"long container {type(thing).__qualname__}.{name}",
                        f"A step changed {type(thing).__qualname__}.{name}, a {type(value).__name__} of "
                        f"{changed[id(value)]} entries. One of more than {MOST_ENTRIES} counts as data, which the "
                        "replicas of one process share: whatever one of them changes is changed for all, where "
                        "processes would have one each. Keep so many entries in a tensor, such as a buffer of a "
                        "module, or change it outside of strategy.run (docs/replicas.md).",
                    )

    def forget(self) -> None:
        """There are other objects now."""
        self._all = None

    def changed(self, things: Sequence[tuple[Any, ObjectContent]]) -> list[tuple[Any, ObjectContent]] | None:
        """The objects that were written to; ``None`` if it is known at once that there are none."""
        if self._all is not None and self._all.are_same(things):
            return None
        self._all = None
        return [(thing, content) for thing, content in things if not content.same(thing.__dict__)]

    def renew(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        """Remembers the objects as they are."""
        looked = self._all is not None
        if self._all is not None:
            self._all.renew()
            if self._all.have_same_attributes(things) and self._all.have_same_entries():
                return
        for thing, content in things:
            content.mark(thing.__dict__, tensors=not looked)
        self._all = AllObjects(things)

    def renew_all(self, things: Sequence[tuple[Any, ObjectContent]]) -> None:
        """Remembers other objects than before, all of which were looked at."""
        self.forget()
        self.renew(things)
        for _, content in things:
            content.fresh = ()


def _renewed(mark: Mark | None, value: Any, tensors: bool) -> Mark:
    if mark is None:
        return Mark(value)
    mark.renew(tensors=tensors)
    return mark


def _end_of(box: Any) -> tuple[int, Any]:
    """What adding to a container changes: its size, or, where the first ones go meanwhile, the last entry."""
    return len(box), None if not box or isinstance(box, set | dict) else id(box[-1])


def when_gone(let_go: Callable[[int], None], number: int) -> Callable[[Any], None]:
    """What a weak reference calls: a method, whose object it does not keep alive, with a number."""
    known = weakref.WeakMethod(let_go)

    def gone(_: Any) -> None:
        if (method := known()) is not None and not sys.is_finalizing():
            method(number)

    return gone
