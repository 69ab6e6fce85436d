"""What replicas made each for itself in a step, and keep in the same place, such as an optimizer of the first step.

In cross-replica context the program sees what the first replica has made. What it writes there reaches the counterparts
of the other replicas. These are modules, optimizers and the like, and objects that hold such; what holds tensors alone
is mostly a result of the step, and another one in each.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.variables.content.copies import ATOMS, PLAIN_TENSORS, is_container
from tfstyle_dist.variables.content.object_content import ObjectContent
from tfstyle_dist.variables.content.parameter_marks import are_alike
from tfstyle_dist.variables.content.state_objects import MOST_LOOKED_AT, Belongs, belongings, is_trained, stays
from tfstyle_dist.variables.first_values import is_own_statistic
from tfstyle_dist.variables.known_tensors import find_record

_NOTHING = ATOMS | PLAIN_TENSORS
_Pair = tuple[Any, Any]


class Counterparts:
    """Finds them where a run ends, and gives both the same attributes for a replica.

    Args:
        places: by id: the content of an object that is content.
        take: makes an object or a parameter content.
        turn: gives the turn to a replica, or back to cross-replica context.
        follow: makes a replica's parameter get what is written to the first replica's.
    """

    def __init__(
        self,
        places: dict[int, Any],
        take: Callable[..., bool],
        turn: Callable[[int | None], None],
        follow: Callable[[torch.Tensor, int, torch.Tensor], None],
    ) -> None:
        self._places, self._take, self._turn, self._follow = places, take, turn, follow
        self._found: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def find(self, things: Sequence[tuple[Any, ObjectContent]], others: Iterable[int]) -> bool:
        """Looks at the attributes that are other objects than before; cross-replica context shows the first replica's.

        Args:
            things: the objects with their contents, just marked.
            others: the replicas but the first one.

        Returns:
            Whether there were any, so that objects are content that were not.
        """
        found: dict[int, list[tuple[Any, Any, Belongs]]] = {}
        for thing, content in things:
            for name in content.fresh:
                for replica in others:
                    part = belongings(thing)
                    pairs = _pairs(thing.__dict__.get(name), content.dicts[replica].get(name), stays)
                    found.setdefault(replica, []).extend((one, own, part) for one, own in pairs)
            content.fresh = ()
        if not any(found.values()):
            return False
        for made in found.values():
            for one, _, part in made:
                self._take(one, part)
        for replica, made in found.items():
            self._turn(replica)  # so that what it made is what it has
            for _, own, part in made:
                self._take(own, part)
        self._turn(None)
        for replica, made in found.items():
            for one, own, _ in made:
                self._join(replica, one, own)
        return True

    def _join(self, replica: int, one: Any, own: Any) -> None:
        if (replica, id(one)) in self._found and self._found[replica, id(one)][1]() is own:
            return
        first, its = self._places.get(id(one)), self._places.get(id(own))
        if isinstance(one, torch.Tensor):
            if first is None or its is None:
                return
            self._follow(one, replica, own)
        elif not (isinstance(first, ObjectContent) and isinstance(its, ObjectContent)):
            return
        self._found[replica, id(one)] = refer_to(one), refer_to(own)
        if isinstance(first, ObjectContent) and isinstance(its, ObjectContent):
            first.dicts[replica] = its.dicts[replica]
            if isinstance(one, torch.nn.Module):
                _begin_alike(one, its.dicts[replica])
            for name, value in list(one.__dict__.items()):
                for pair in _pairs(value, its.dicts[replica].get(name), self._is_content):
                    self._join(replica, *pair)

    def _is_content(self, value: Any) -> bool:
        return id(value) in self._places

    def has(self, thing: Any) -> bool:
        """Whether other replicas have something of their own in the place of this one."""
        return any(one() is thing for one, _ in self._found.values())

    def of(self, replica: int) -> dict[int, _Pair]:
        """What a replica has in the place of what the first one made, by the latter's ``id``."""
        alive = {key: (one(), own()) for key, (one, own) in self._found.items()}
        self._found = {
            key: self._found[key] for key, pair in alive.items() if pair[0] is not None and pair[1] is not None
        }
        return {key[1]: alive[key] for key in self._found if key[0] == replica}


def _begin_alike(module: torch.nn.Module, own: dict[str, Any]) -> None:
    """Gives a replica the first one's values of buffers that it made in a step, but for statistics."""
    for name, buffer in torch_internals.buffers_of(module).items():
        its = own[torch_internals.BUFFERS].get(name)
        record = find_record(its)
        if buffer is None or record is None or record.maker is None or is_own_statistic(record):
            continue
        if are_alike(its, buffer):
            for held in (its, *record.components):  # also what is sent to the other workers
                with torch.inference_mode(held.is_inference()), torch.no_grad():
                    held.copy_(buffer)


def _pairs(one: Any, own: Any, counts: Callable[[Any], bool], outer: tuple[int, ...] = ()) -> Iterator[_Pair]:
    """The parameters, and the objects that count, of two values that have the same place in both."""
    kind = type(one)
    if one is own or kind is not type(own) or kind in _NOTHING:
        return
    if is_container(one) or isinstance(one, tuple):
        if len(one) <= MOST_LOOKED_AT and id(one) not in outer:
            for first, its in _entries(one, own):
                yield from _pairs(first, its, counts, (*outer, id(one)))
    elif isinstance(one, torch.Tensor):
        if is_trained(one) and is_trained(own):
            yield one, own
    elif counts(one) and counts(own):
        yield one, own


def _entries(one: Any, own: Any) -> Iterable[_Pair]:
    if isinstance(one, dict):
        return [(value, own[key]) for key, value in one.items() if key in own]
    return zip(one, own, strict=False) if isinstance(one, list | tuple | deque) and len(one) == len(own) else ()
