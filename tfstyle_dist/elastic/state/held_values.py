"""The containers and tensors that the attributes of objects name, and what was in them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.content.copies import ATOMS, CONTAINERS, MOST_ENTRIES, base_of, has_attributes_beside
from tfstyle_dist.variables.content.held_inside import stand_in_for
from tfstyle_dist.variables.content.stand_ins import Entries, StandIn, set_attributes
from tfstyle_dist.variables.content.state_objects import Belongs, is_state


class HeldValues:
    """What is found from the attributes of some objects on, also those of objects that no replica has looked for yet.

    Most steps leave all of it the same objects, whose numbers alone change; ``same`` sees that in a few calls, so that
    a step need not look at each attribute of each module.

    Args:
        roots: the attributes of the objects.
        parameters: what is kept elsewhere.

    Attributes:
        tensors: those that a step may write to.
        randoms: Python's random numbers.
        arrays: those of numpy that a step may write to.
    """

    def __init__(self, roots: Sequence[dict[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.randoms: list[random.Random] = []
        self.arrays: list[np.ndarray] = []
        self._roots, self._parameters = list(roots), list(parameters)
        self._seen: set[int] = {id(parameter) for parameter in parameters}
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any] | deque[Any]] = []
        self._sets: list[tuple[set[Any], list[Any]]] = []
        self._long: list[tuple[Any, int]] = []
        self._of_graphs: list[torch.Tensor] = []
        self._stand_ins: list[tuple[StandIn, dict[str, Any]]] = []
        for root in roots:
            self._look_at(root)
        self._dict_sizes, self._list_sizes = list(map(len, self._dicts)), list(map(len, self._lists))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(_values, self._dicts)))
        self._entries = list(chain.from_iterable(self._lists))

    def _look_at(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            if type(value) in (torch.Tensor, torch.nn.Buffer):
                self._seen.add(id(value))
                (self._of_graphs if value.requires_grad else self.tensors).append(value)
        elif kind in CONTAINERS:
            self._look_into(value)
        elif has_attributes_beside(value):
            self._look_into(value)
            self._look_at(vars(value))
        elif isinstance(value, tuple):
            for part in value:
                self._look_at(part)
        elif kind is np.ndarray:
            self._seen.add(id(value))
            if value.flags.writeable and not value.dtype.hasobject:
                self.arrays.append(value)
        elif isinstance(value, random.Random):
            self._seen.add(id(value))
            self.randoms.append(value)
        elif isinstance(value, dict):
            self._look_into_mapping(value)
        elif (stand_in := stand_in_for(value, Belongs.BESIDE)) is not None:  # such as a step has made
            self._keep(value, stand_in)
        elif is_state(value, Belongs.BESIDE):
            self._look_at(value.__dict__)

    def _look_into_mapping(self, box: dict[Any, Any]) -> None:
        """A dict of a class of the program's own, whether replicas share it or not."""
        if len(box) > MOST_ENTRIES:
            self._long.append((box, len(box)))
            return
        self._keep(box, Entries(box))
        self._look_at(getattr(box, "__dict__", None))

    def _keep(self, value: Any, stand_in: StandIn) -> None:
        self._seen.add(id(value))
        self._stand_ins.append((stand_in, attributes := stand_in.__dict__))
        self._look_at(attributes)

    def _look_into(self, box: Any) -> None:
        if len(box) > MOST_ENTRIES:
            self._long.append((box, len(box)))
            return
        self._seen.add(id(box))
        if isinstance(box, dict):
            self._dicts.append(box)
        elif isinstance(box, set):
            self._sets.append((box, list(box)))
        else:
            self._lists.append(box)
        for part in list(box.values() if isinstance(box, dict) else box):
            self._look_at(part)

    def same(self, roots: Sequence[dict[str, Any]], parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the same would be found from these on."""
        for stand_in, _ in self._stand_ins:
            stand_in.renewed()
        return (
            len(roots) == len(self._roots)
            and all(map(is_, roots, self._roots))
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and list(map(len, self._dicts)) == self._dict_sizes
            and all(map(is_, chain.from_iterable(map(_values, self._dicts)), self._values))
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
            and list(map(len, self._lists)) == self._list_sizes
            and all(map(is_, chain.from_iterable(self._lists), self._entries))
            and all(set(map(id, now)) == set(map(id, was)) for now, was in self._sets)
            and all(len(box) == size for box, size in self._long)
            and all(tensor.requires_grad for tensor in self._of_graphs)
            and not any(tensor.requires_grad for tensor in self.tensors)
        )

    def put_back(self) -> None:
        """All containers hold what they held."""
        entries = iter(zip(self._keys, self._values, strict=True))
        for box, size in zip(self._dicts, self._dict_sizes, strict=True):
            was = [next(entries) for _ in range(size)]
            box.clear()
            box.update(dict(was))
        items = iter(self._entries)
        for row, size in zip(self._lists, self._list_sizes, strict=True):
            parts = [next(items) for _ in range(size)]
            base_of(row).clear(row)
            base_of(row).extend(row, parts)
        for members, had in self._sets:
            set.clear(members)
            set.update(members, had)
        for stand_in, attributes in self._stand_ins:
            set_attributes(stand_in, attributes)
        for box, size in self._long:
            if len(box) != size:
                warn_once(
                    "elastic long container in a step",
                    f"A step that is done again had changed a {type(box).__name__} of {size} entries to one of "
                    f"{len(box)}, and an elastic job puts back containers of at most {MOST_ENTRIES} entries: what it "
                    "added or took away is done twice. Keep many entries in tensors.",
                )


def _values(box: dict[Any, Any]) -> Any:
    return box.values()
