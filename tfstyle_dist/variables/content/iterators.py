"""Where an iterator is. All replicas of a process have one in common: what one takes, the next one does not find."""

from __future__ import annotations

import gc
import itertools
import operator
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

_MOST = 256
"""Of what an iterator refers to, also by iterators within it, that is looked at."""
_SHORT = 64
"""Of texts that are compared."""
_PYTHON = frozenset({"builtins", "itertools"})
_LOADERS = "torch.utils.data."


class Position(str):
    """Where an iterator is; another one once it has been asked for a value, for nearly all kinds of them."""

    __slots__ = ()

    @classmethod
    def of(cls, iterator: Any) -> Position:
        """That of an iterator of ``is_iterator``."""
        seen, waiting, found = set[int](), [iterator], list[Any]()
        while waiting and len(found) < _MOST:
            if id(one := waiting.pop()) not in seen:
                seen.add(id(one))
                found.append(_place(one))
                for part in islice(_parts(one), _MOST - len(found)):
                    if is_iterator(type(part)):
                        waiting.append(part)
                    plain = type(part) in (int, float) or (type(part) is str and len(part) <= _SHORT)
                    found.append(part if plain else id(part))
        return cls(found)


def is_iterator(kind: type) -> bool:
    """Whether objects of a class are generators, iterators of Python's own, or of a ``DataLoader``."""
    module = str(kind.__module__)
    return hasattr(kind, "__next__") and (module in _PYTHON or module.startswith(_LOADERS))


def _place(iterator: Any) -> Any:
    """What an iterator says of itself."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if isinstance(iterator, types.GeneratorType):
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    return None if hasattr(iterator, "__dict__") else operator.length_hint(iterator, -1)


def _parts(iterator: Any) -> Iterator[Any]:
    """What it refers to, also in a tuple, as of ``zip``: of a generator its variables, and what its loops are at."""
    held = list(vars(iterator).values()) if hasattr(iterator, "__dict__") else gc.get_referents(iterator)
    for part in held:
        yield from part if type(part) is tuple else (part,)
