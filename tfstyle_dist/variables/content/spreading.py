"""What cross-replica context wrote to the objects of one replica reaches the objects of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.devices import is_accelerator
from tfstyle_dist.variables.content.copies import MOST_ENTRIES, NAMING, PLAIN_TENSORS, Copier
from tfstyle_dist.variables.content.counterparts import Counterparts
from tfstyle_dist.variables.content.discovery import Discovery
from tfstyle_dist.variables.content.marks import Mark
from tfstyle_dist.variables.content.object_content import ObjectContent
from tfstyle_dist.variables.content.parameter_marks import are_alike, has_memory_at
from tfstyle_dist.variables.content.parameter_rows import ParameterRows
from tfstyle_dist.variables.content.stand_ins import class_of
from tfstyle_dist.variables.content.state_objects import Belongs, belongings, parts_of_optimizer

Things = Sequence[tuple[Any, ObjectContent]]


class Spreader:
    """Copies attributes to the other replicas; what they have in the place of what was not written to stays.

    Args:
        count: the local replicas.
        take: makes what is found content; returns whether it is.
        rows: the parameters; they know where copies belong, and which memory stands for which.
        counterparts: what a replica has in the place of what the first one made in a step.
        adopt: called with a module that may have got parameters outside of every scope.
        same: by ``id`` what all replicas have in common, although it could be copied.

    Attributes:
        discovery: what finds the objects that functions name.
    """

    def __init__(
        self,
        count: int,
        take: Callable[[Any, Belongs], bool],
        rows: ParameterRows,
        counterparts: Counterparts,
        adopt: Callable[[torch.nn.Module], None],
        same: Mapping[int, tuple[Any, Any]],
    ) -> None:
        self._count, self._take, self._device, self._twins, self._adopt = count, take, rows.device, rows.twins, adopt
        self._counterparts, self._same, self.discovery = counterparts, same, Discovery(take)
        rows.take = self._take_found
        self._unfilled: list[tuple[Any, ObjectContent, Belongs]] = []
        self._whose_parts: set[int] = set()  # by ``id``: optimizers whose parts are being taken
        self.forget()

    def forget(self) -> None:
        """All objects that name each other were copied."""
        self._known: list[dict[int, tuple[Any, Any]]] = [{} for _ in range(self._count)]

    def copier(self, replica: int, parts: Belongs) -> Copier:
        """What copies values for a replica, each once.

        Args:
            replica: its number.
            parts: what they were found in.
        """

        def copy(value: torch.Tensor) -> torch.Tensor:
            return self._twins.copy(replica, value, self._device(replica, value.device))

        place = partial(self._place, replica)
        take, in_order = partial(self._take_found, part=parts), self.discovery.in_order
        return Copier(take, copy, self._known[replica], self._same, place, in_order)

    def _place(self, replica: int, device: torch.device) -> torch.device:
        """What a replica has in the place of a device that an object names, such as that of its tensors."""
        # Without an index it is the current one, and that is the replica's own in each turn.
        return self._device(replica, device) if is_accelerator(device.type) and device.index is not None else device

    def take_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes what an optimizer that all replicas have in common has, names in its methods, or calls as hooks."""
        if id(optimizer) in self._whose_parts:  # a part leads back to it, such as a method of its own
            return
        self._whose_parts.add(id(optimizer))
        try:
            self.discovery.follow_class(type(optimizer))
            for held in parts_of_optimizer(optimizer):
                self._take_found(held, Belongs.PART)
        finally:
            self._whose_parts.remove(id(optimizer))

    def _take_found(self, value: Any, part: Belongs) -> bool:
        if isinstance(value, NAMING):
            self.discovery.follow(value)
            return False
        return self._take(value, part)

    def fill(
        self, thing: Any, content: ObjectContent, parts: Belongs, then: Callable[[Any, ObjectContent], None]
    ) -> None:
        """Gives the other replicas their attributes of an object, and of those that it has, and so on.

        One after the other, not each within the one that has it: chains of objects may be longer than Python's stack.

        Args:
            thing: the object, with its attributes.
            content: of each replica.
            parts: what its attributes are.
            then: called with each of these objects, last with this one.
        """
        self._unfilled.append((thing, content, parts))
        if len(self._unfilled) > 1:
            return  # the call that has begun does it
        filled = self._unfilled
        try:
            for one, its, has in filled:
                self.discovery.follow_class(class_of(one))
                now = one.__dict__
                for replica, own in enumerate(its.dicts):
                    if own is not now:
                        copier = self.copier(replica, has)
                        own.update({name: copier(value) for name, value in list(now.items())})
        finally:
            self._unfilled = []
        with ExitStack() as taken:  # the last one first, and all of them, whatever one raises
            for one, its, _ in filled:
                taken.callback(then, one, its)

    def copy_all(self, things: Things, others: Sequence[int]) -> None:
        """Gives all replicas copies of what the first one has.

        Args:
            things: the objects with their contents.
            others: the replicas but the first one.
        """
        for thing, content in things:
            for replica in others:
                copier, own = self.copier(replica, belongings(thing)), content.dicts[replica]
                kept = {name: own[name] for name in content.own}
                own.clear()
                own.update({name: copier(value) for name, value in list(thing.__dict__.items()) if name not in kept})
                own.update(kept)
        self.forget()

    def copy_changed(self, changed: Things, things: Things, others: Sequence[int]) -> None:
        """Gives the other replicas what changed: new objects as copies; what was written in place is written in place.

        Args:
            changed: the objects that were written to, with their contents.
            things: all objects with their contents.
            others: the replicas but the first one.
        """
        if not changed:
            return
        for replica in others:
            self._known[replica].update(self._counterparts.of(replica))
        self._find_twins(things, others)
        for thing, content in changed:
            now = thing.__dict__
            written, gone = content.changes(now)
            for replica in others:
                copier, own = self.copier(replica, belongings(thing)), content.dicts[replica]
                own.update({name: copier(now[name]) for name in written})
                for name in gone:
                    own.pop(name, None)
            if isinstance(thing, torch.nn.Module):
                self._adopt(thing)
        self.forget()

    def renew_views(self, left: Sequence[int], things: Things, others: Sequence[int]) -> None:
        """Copies what attributes have in memory that parameters have left; nothing says whether it was written to.

        Args:
            left: addresses in that memory.
            things: all objects with their contents.
            others: the replicas but the first one.
        """
        for thing, content in things if left else ():
            for name, value in thing.__dict__.items():
                for replica in others:
                    _renew_views(value, content.dicts[replica].get(name), left)

    def _find_twins(self, things: Things, others: Sequence[int]) -> None:
        """Writes to the other replicas what was written in place, and notes what each has in the place of what."""
        for thing, content in things:
            now = thing.__dict__
            for name, value, mark in content.marks():
                for replica in others:
                    self._pair(now.get(name), value, content.dicts[replica].get(name), mark, replica)

    def _pair(self, now: Any, old: Any, own: Any, mark: Any, replica: int) -> None:
        known = self._known[replica]
        if isinstance(now, torch.nn.Parameter):
            return  # which is content itself
        if isinstance(old, torch.Tensor) and isinstance(own, torch.Tensor) and isinstance(now, torch.Tensor):
            if now is old:
                if own is not old and (
                    type(mark) is not Mark or mark.same() or (mark.is_in_place() and _write_in_place(own, now))
                ):
                    known[id(now)] = (now, own)
                    self._twins.note(replica, now, own)
            elif _is_converted(old, now):
                known[id(now)] = (now, own.to(self._device(replica, now.device), now.dtype))
            return
        if type(mark) is not Mark or type(now) is not type(old) or type(own) is not type(old) or own is old:
            return
        if now is old and mark.same():
            known[id(now)] = (now, own)
        for key, part in mark.entries():
            if (key in now and key in own) if isinstance(old, dict) else key < min(len(now), len(own)):
                self._pair(now[key], part.value, own[key], part, replica)


def _write_in_place(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Writes a value into the memory of what a replica has, where others may find it; returns whether it fits."""
    if type(own) not in PLAIN_TENSORS or own.requires_grad or not are_alike(own, value):
        return False
    try:
        with torch.no_grad():
            own.copy_(value)
    except RuntimeError:  # several of its places are one in memory, or it was made in inference mode
        return False
    return True


def _renew_views(value: Any, own: Any, left: Sequence[int], outer: tuple[int, ...] = ()) -> None:
    if own is value or type(own) is not type(value) or id(value) in outer:
        return
    if type(value) in PLAIN_TENSORS:
        if has_memory_at(value, left):
            _write_in_place(own, value)
    elif isinstance(value, dict):
        for key, part in value.items():
            _renew_views(part, own.get(key), left, (*outer, id(value)))
    elif isinstance(value, list) and len(value) <= MOST_ENTRIES:
        for part, its in zip(value, own, strict=False):
            _renew_views(part, its, left, (*outer, id(value)))


def _is_converted(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether a buffer was replaced by itself in another type or on another device."""
    if old.shape != new.shape or (old.dtype, old.device) == (new.dtype, new.device) or old.is_meta or new.is_meta:
        return False
    if sparse_parts.is_sparse(old) and old.layout is new.layout:
        (*places, values), (*others, new) = sparse_parts.parts_of(old), sparse_parts.parts_of(new)
        alike = all(torch.equal(a.to(b.device), b) for a, b in zip(places, others, strict=True))
        return alike and torch.equal(values.to(new.device, new.dtype), new)
    if not (sparse_parts.is_plain(old) and sparse_parts.is_plain(new)):
        return False
    return torch.equal(old.to(new.device, new.dtype), new)
