"""Where an iterator is. All replicas of a process have one in common: what one takes, the next one does not find."""

from __future__ import annotations

import gc
import itertools
import operator
import types
from typing import Any

_DEPTH = 4
"""Of iterators within each other, as a generator over a ``zip`` of lists."""
_MOST = 64
"""Of what an iterator refers to that is looked at."""
_PYTHON = frozenset({"builtins", "itertools"})
_LOADERS = "torch.utils.data."
_VALUES = frozenset({int, float, str})


class Position(str):
    """Where an iterator is; another one once it has been asked for a value, for nearly all kinds of them."""

    __slots__ = ()

    @classmethod
    def of(cls, iterator: Any) -> Position:
        """That of an iterator of ``is_iterator``."""
        return cls(_parts(iterator, _DEPTH))


def is_iterator(kind: type) -> bool:
    """Whether objects of a class are generators, iterators of Python's own, or of a ``DataLoader``."""
    return hasattr(kind, "__next__") and (kind.__module__ in _PYTHON or kind.__module__.startswith(_LOADERS))


def _parts(iterator: Any, depth: int) -> list[Any]:
    """Numbers and texts that change when it is asked for a value."""
    if isinstance(iterator, itertools.count):
        return [repr(iterator)]
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        own: list[Any] = [None if frame is None else frame.f_lasti]
        held = gc.get_referents(iterator)  # its variables, and what its loops are at
    elif hasattr(iterator, "__dict__"):
        own, held = [], list(vars(iterator).values())
    else:
        own, held = [operator.length_hint(iterator, -1)], gc.get_referents(iterator)
    for each in itertools.chain.from_iterable(part if type(part) is tuple else (part,) for part in held[:_MOST]):
        if type(each) in _VALUES:
            own.append(each)
        elif is_iterator(type(each)) and depth:
            own.append(_parts(each, depth - 1))
        else:
            own.append(id(each))
    return own
