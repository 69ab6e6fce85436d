"""Which objects are state of the training: their attributes differ from replica to replica."""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.content.common_objects import HeldInCommon
from tfstyle_dist.variables.content.copies import ATOMS, NAMING, is_container
from tfstyle_dist.variables.content.inner_states import is_common
from tfstyle_dist.variables.content.stand_ins import Slots, StandIn, WeakEntries, meant_by, slots_of

# Of these packages objects are machinery or data, unless they are modules, optimizers, schedulers or scalers.
_SKIPPED = (
    "_io", "_pytest", "asyncio", "builtins", "collections", "concurrent", "contextlib", "ctypes",
    "datasets", "enum", "functools", "importlib", "inspect", "io", "itertools", "keras", "logging", "matplotlib",
    "multiprocessing", "numpy", "pandas", "pathlib", "pluggy", "pytest", "queue", "re", "sklearn", "subprocess",
    "tensorboard",
    "tfstyle_dist", "threading", "tokenizers", "tqdm", "types", "typing", "unittest", "weakref",
    *torch_internals.MACHINERY,
)  # fmt: skip
_IN_PYTHON = UserDict, UserList, ChainMap
"""Of these packages, and yet a program's own lists and dicts."""
_DATA = torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler
_MOST_HELD = 4096
"""Of entries in a container of state, such as averages of all parameters; more are data."""
FEW = 64
"""Of entries in a container of objects that hold state, such as the groups of an optimizer; more are data."""
_DEPTH = 6
"""Of objects within each other that are looked into for such objects."""
_MOST_VALUES = 500
"""That are looked at for such objects: what holds no state is looked at in each run."""
MOST_LOOKED_AT = 256
"""Of entries in a container that a step has filled."""
BOXES = (dict, list, tuple, set, deque)
HOLDERS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


_ALONE = torch.Tensor, enum.Enum, types.ModuleType, *HOLDERS


class Belongs(enum.IntEnum):
    """To what an object belongs, which says what else makes it state."""

    NOTHING = 0
    """It counts if it holds state itself."""
    BESIDE = 1
    """A step names it, or it lies beside a module, an optimizer or the like in an object: it counts but for data."""
    PART = 2
    """It is a part of such a one: it counts whatever it holds."""


def is_state(thing: Any, part: Belongs = Belongs.NOTHING, arrays: bool = True) -> bool:
    """Whether an object's attributes are content.

    Those of modules, optimizers, schedulers and scalers are, those of optimizers of a library's own class too. Those of
    other objects are if they hold such, or tensors: directly, in an attribute's attributes, or in short containers.

    Args:
        thing: any object.
        part: what it was found in.
        arrays: whether replicas have elements of their own in small arrays.
    """
    if isinstance(thing, HOLDERS):
        if isinstance(thing, torch.jit.ScriptModule):
            raise TypeError(
                "A torch.jit module keeps its parameters where the replicas of one process cannot have their own. Use "
                "torch.compile, or start one process for each replica (torchrun)."
            )
        return not _is_unfinished(thing)
    if isinstance(thing, HeldInCommon) or not is_plain(thing):
        return False
    if part is Belongs.PART or is_optimizer(type(thing)) or _holds_state(thing, 2, None):
        return True
    return _holds_state(thing, _DEPTH, [None] * _MOST_VALUES) or (part is Belongs.BESIDE and is_helper(thing, arrays))


def slotted(thing: Any, part: Belongs, arrays: bool) -> StandIn | None:
    """What stands for an object with slots, or a weak dict, that is content, where a plain object would be; else none.

    Args:
        thing: any object.
        part: what it was found in.
        arrays: as above; where they have not, in elastic jobs, entries by weak keys, which cannot be sent, are common.
    """
    held = _stand_in(thing, arrays)
    if held is None or part is Belongs.PART or is_optimizer(type(thing)):
        return held
    counts = part is Belongs.BESIDE and is_helper(held.__dict__, arrays)
    return held if counts or _holds_state(held, _DEPTH, [None] * _MOST_VALUES) else None


def _stand_in(thing: Any, weak: bool = True) -> StandIn | None:
    kind = type(thing)
    if kind is weakref.WeakKeyDictionary:
        return WeakEntries(thing) if weak else None
    if kind.__dictoffset__ or issubclass(kind, (*BOXES, torch.Tensor, type)) or not slots_of(kind):
        return None
    module = kind.__module__ or ""
    skipped = _is_skipped(module) or module.partition(".")[0] in sys.stdlib_module_names
    return None if skipped else Slots(thing)


def belongings(thing: Any) -> Belongs:
    """What the objects are that an object has."""
    meant = meant_by(thing)
    if isinstance(meant, HOLDERS) or is_optimizer(type(meant)):
        return Belongs.PART
    return Belongs.BESIDE if _has_state_beside(thing) else Belongs.NOTHING


def _has_state_beside(thing: Any) -> bool:
    return any(issubclass(type(held), HOLDERS) for held in list(thing.__dict__.values()))


def is_helper(thing: Any, arrays: bool = True) -> bool:
    """Whether an object, with all that it has, is small and of this program alone: a counter, a schedule, a callback.

    Not what has long arrays, data, threads or files: of these there is one, and who uses it must find what belongs to
    it.

    Args:
        thing: an object or a container.
        arrays: as above.
    """
    seen: set[int] = set()
    stack: list[Any] = [(thing,)]
    while stack:
        one = stack.pop()
        parts = parts_of(one, _MOST_HELD) if isinstance(one, BOXES) else list(one.__dict__.values())
        for part in parts:
            kind = type(part)
            if kind in ATOMS or id(part) in seen or issubclass(kind, _ALONE):
                continue
            seen.add(id(part))
            own = arrays and (is_container(one) or not issubclass(type(one), dict))  # a dict of its own class is shared
            if len(seen) > _MOST_VALUES or isinstance(part, _DATA) or is_common(part, own):
                return False
            if isinstance(part, BOXES) or (is_plain(part) and not _has_state_beside(part)):
                stack.append(part)
            elif (held := _stand_in(part, arrays)) is not None and not _has_state_beside(held):
                stack.append(held.__dict__)
    return True


def is_optimizer(kind: type) -> bool:
    """Whether this is what a library that has its own class of optimizers, such as fastai, calls one."""
    return all(callable(getattr(kind, name, None)) for name in ("step", "zero_grad", "state_dict"))


def _is_unfinished(thing: Any) -> bool:
    """Whether a lazy module, or a layer of Keras that is not built, makes its variables in its first call.

    Until then all replicas have it in common; then it is looked at again. A lazy module whose variables came with a
    state that was loaded gets another class in its first call all the same.
    """
    if isinstance(thing, torch.nn.modules.lazy.LazyModuleMixin):
        becomes = thing.cls_to_become not in (None, type(thing))
        return becomes or bool(thing.has_uninitialized_params())  # type: ignore[misc]
    return hasattr(thing, "_post_build") and getattr(thing, "built", True) is False


def is_plain(thing: Any) -> bool:
    """Whether this is an object of a class of the user's or of a library of training code."""
    kind = type(thing)
    if isinstance(thing, (type, types.ModuleType, BaseException, threading.Thread, torch.Tensor, enum.Enum, *HOLDERS)):
        return False
    if not _has_content(thing) or is_container(thing):
        return False
    if _is_skipped(kind.__module__ or "") and kind not in _IN_PYTHON:
        return False
    try:
        object.__setattr__(thing, "__dict__", thing.__dict__)
    except (AttributeError, TypeError):
        return False
    return True


def _has_content(thing: Any) -> bool:
    """Whether an object has attributes that can be exchanged; numbers, for one, cannot be referred to weakly."""
    return type(getattr(thing, "__dict__", None)) is dict and type(thing).__weakrefoffset__ != 0


def parts_of(value: Any, most: int) -> list[Any]:
    """What a list, a tuple, a dict, a set, a frozen one or a deque holds, if that is not more than so much.

    Methods of a class of its own are not called: they may make, or import, what they return.
    """
    kind: Any = next(k for k in (*BOXES, frozenset) if isinstance(value, k))
    if kind.__len__(value) > most:
        return []
    return list(dict.values(value) if isinstance(value, dict) else kind.__iter__(value))


def stays(value: Any, depth: int = 2) -> bool:
    """Whether a program is likely to keep, and to change, what a step made: a module or the like, or what has one.

    Args:
        value: what was made.
        depth: how many objects may lie around a module, as around those of a loss that is made of two others.
    """
    if isinstance(value, HOLDERS):
        return is_state(value)
    most, meant = MOST_LOOKED_AT if depth > 1 else FEW, value if is_plain(value) else _stand_in(value)
    return meant is not None and any(
        isinstance(part, HOLDERS) or (depth > 1 and type(part) not in ATOMS and stays(part, depth - 1))
        for held in list(meant.__dict__.values())
        for part in (parts_of(held, most) if isinstance(held, list | tuple | dict) else (held,))
    )


def is_trained(value: torch.Tensor) -> bool:
    """Whether gradients are accumulated for a tensor."""
    if isinstance(value, torch.nn.Parameter):
        return True
    try:
        return value.requires_grad and value.is_leaf
    except RuntimeError:  # a view that was made without gradients, of what was written to with them
        return False


def optimized_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer; a wrapper of one may have no groups."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def parts_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The objects and functions that an optimizer has directly or in a container: schedules of its own, hooks."""
    for held in list(vars(optimizer).values()):
        parts = parts_of(held, _MOST_HELD) if isinstance(held, list | tuple | dict) else [held]
        yield from (part for part in parts if isinstance(part, NAMING) or is_plain(part))


def check_adoptable(thing: Any) -> None:
    """Refuses what has no attributes that could be content.

    Raises:
        TypeError: it has none.
    """
    if not _has_content(thing) or isinstance(thing, type | types.ModuleType):
        raise TypeError(
            f"experimental_adopt takes a module, an optimizer or another object with attributes of its own that can be "
            f"referred to weakly, got {type(thing).__name__}: {thing!r}."
        )


@functools.cache
def _is_skipped(module: str) -> bool:
    return any(module == skipped or module.startswith(f"{skipped}.") for skipped in _SKIPPED)


def _holds_state(thing: Any, depth: int, left: list[None] | None, outer: tuple[int, ...] = ()) -> bool:
    return any(_is_or_holds(value, depth, left, outer) for value in list(thing.__dict__.values()))


def _is_or_holds(value: Any, depth: int, left: list[None] | None, outer: tuple[int, ...]) -> bool:
    """Whether a value is a tensor or the like, or holds one.

    Args:
        value: anything.
        depth: how many objects within each other are looked into.
        left: as long as the number of values that are looked at; ``None``: all, but no objects in containers.
        outer: the containers in which the value is, by ``id``; one may hold itself.
    """
    kind = type(value)
    if kind in ATOMS or issubclass(kind, types.ModuleType) or id(value) in outer or left == []:
        return False
    if left is not None:
        left.pop()
    if isinstance(value, (torch.Tensor, torch.Generator, *HOLDERS)):
        return True
    if isinstance(value, list | tuple | dict):
        parts = parts_of(value, _MOST_HELD)
        if parts and isinstance(value, dict):  # what is kept of each parameter, by the parameter
            parts += dict.keys(value)
        depth = depth if left is not None and len(parts) <= FEW else 0
        return any(_is_or_holds(part, depth, left, (*outer, id(value))) for part in parts)
    if left is not None and isinstance(value, Mapping):  # of its own class, as those of tensordict; in it are others
        return is_plain(value) and _holds_state(value, depth, left, (*outer, id(value)))
    held = value if depth > 0 and is_plain(value) else _stand_in(value) if depth > 0 else None
    return held is not None and _holds_state(held, depth - 1, left, outer)
