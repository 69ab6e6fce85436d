"""What one replica has where another has a given value: copies of what is content, the same object for all else."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.content.stand_ins import is_record
from tfstyle_dist.variables.replicated import Replicated

MOST_ENTRIES = 20_000
"""Longer containers are data, not state: all replicas share them."""

ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, slice, range,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, weakref.ref, torch.layout,
    torch.memory_format, *weakref.ProxyTypes,
})  # fmt: skip
NAMING = types.FunctionType, types.MethodType
"""What refers to objects of the program: hooks, methods and callbacks that a module or a trainer has."""
WEAK: tuple[type[Any], ...] = (weakref.ref, *weakref.ProxyTypes)
"""What refers to objects without keeping them; ``referred_to`` says to which."""
DICTS = frozenset({dict, collections.OrderedDict, collections.defaultdict, collections.Counter})
CONTAINERS = DICTS | {list, set, collections.deque}
_SEQUENCES: tuple[Any, ...] = (list, set, collections.deque)
_FEW = 64
_READ = "__new__", "__len__", "__iter__", "__getitem__"
_copied: set[type] = set(CONTAINERS)  # and a library's own: see count_as_containers
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Buffer})
OWN_GENERATORS = ("numpy.random._generator", "numpy.random.mtrand")
"""The modules of numpy's generators of random numbers."""


def count_as_containers(*kinds: type) -> None:
    """Lets each replica have its own of a library's lists, dicts and sets, as of Python's.

    Args:
        kinds: subclasses of list, dict or set that may be made without arguments, read as these are, and filled with
            the entries of another one; attributes beside the entries are the same in the copies.
    """
    _copied.update(kinds)


def is_own_generator(value: Any) -> bool:
    """Whether this is a generator of random numbers, Python's or numpy's, with a state of its own."""
    kind = type(value)
    own = issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom)
    return own or kind.__module__ in OWN_GENERATORS


def referred_to(value: Any) -> Any:
    """What a weak reference or a proxy is to, of which a proxy has all attributes; ``None`` if that is gone."""
    if type(value) not in weakref.ProxyTypes:
        return value()
    try:
        return value.__reduce_ex__.__self__
    except ReferenceError:
        return None


def is_container(value: Any) -> bool:
    """Whether a replica has its own copy of this list, dict, set or the like."""
    return type(value) in _copied or has_attributes_beside(value)


def has_attributes_beside(value: Any) -> bool:
    """Whether this is a list, a set or a deque of a program's own class that is made and read as these are.

    Each replica has its own of it and of its attributes. A dict of such a class is mostly settings, which it shares;
    what has modules for its entries or attributes stays the same object, as any other that does.
    """
    kind = type(value)
    if kind in _copied or not issubclass(kind, _SEQUENCES) or not kind.__dictoffset__:
        return False
    base = base_of(value)
    if not all(getattr(kind, name, None) is getattr(base, name, None) for name in _READ):
        return False
    if any(vars(c).get("__slots__") for c in kind.__mro__):
        return False
    held = itertools.chain(itertools.islice(base.__iter__(value), _FEW), list(value.__dict__.values()))
    return not any(issubclass(type(part), torch.nn.Module) for part in held)


def base_of(value: Any) -> Any:
    """The class of Python's that a list, a set or a deque is of or derives from, for its methods."""
    return next(base for base in _SEQUENCES if isinstance(value, base))


class Copier:
    """Makes one replica's values from replica 0's.

    Args:
        take: called with each object whose attributes, and each tensor whose inside, may be content, and with
            functions; says whether it is.
        copy: makes the replica's tensor of one of replica 0's.
        known: what the replica already has, by the ``id`` of what replica 0 has.
        same: as ``known``; none of it is copied.
        place: says which device the replica has in the place of one.
        in_order: whether what comes in no order is not looked into: sets.
    """

    def __init__(
        self,
        take: Callable[[Any], bool],
        copy: Callable[[torch.Tensor], torch.Tensor],
        known: dict[int, tuple[Any, Any]] | None = None,
        same: Mapping[int, tuple[Any, Any]] = types.MappingProxyType({}),
        place: Callable[[torch.device], torch.device] = lambda device: device,
        in_order: bool = False,
    ) -> None:
        self._take, self._copy, self._place, self._in_order = take, copy, place, in_order
        self._known, self._same = {} if known is None else known, same
        self._among = 0  # how many are in the longest container around

    def __call__(self, value: Any) -> Any:
        """The replica's value."""
        kind = type(value)
        # A module may load itself when it is asked; a ``WeakMethod`` is a reference of its own class.
        if kind in ATOMS or issubclass(kind, (types.ModuleType, *WEAK)):
            if issubclass(kind, WEAK) and not isinstance(meant := referred_to(value), torch.Tensor | None):
                self._take(meant)
            elif kind in NAMING:
                self._take(value)
            return self._place(value) if kind is torch.device else value
        known = self._same.get(id(value)) or self._known.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if is_container(value):
            return value if len(value) > MOST_ENTRIES else self._entries(value)
        if isinstance(value, tuple):
            parts = [self(v) for v in value]
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            return kind(*parts) if hasattr(value, "_fields") else kind(parts)
        if isinstance(value, functools.partial):
            self(value.args), self(value.func), self(value.keywords)
            return value
        if kind is frozenset:
            self._take_parts(value)
            return value
        if isinstance(value, RemovableHandle):
            return self._handle(value)
        if is_own_generator(value):
            return self._note(value, copy.deepcopy(value))
        if not is_record(value, self._among):
            self._take(value)
        return value

    def _note(self, value: Any, own: Any) -> Any:
        self._known[id(value)] = (value, own)
        return own

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, Replicated) or self._take(value):
            return value
        if type(value) not in PLAIN_TENSORS or value.requires_grad:
            return value  # of a graph that was made outside of the replicas, or of a class of its own
        own: torch.Tensor = self._note(value, self._copy(value))
        own.__dict__.update({name: self(held) for name, held in list(value.__dict__.items())})
        return own

    def _entries(self, value: Any) -> Any:
        before, self._among = self._among, max(self._among, len(value))
        own = self._container(value)
        self._among = before
        return own

    def _container(self, value: Any) -> Any:
        if isinstance(value, collections.defaultdict):
            own: Any = collections.defaultdict(value.default_factory)
        elif has_attributes_beside(value):
            return self._with_attributes(value)
        else:
            own = collections.deque(maxlen=value.maxlen) if isinstance(value, collections.deque) else type(value)()
        self._note(value, own)
        if isinstance(value, dict):
            for key, entry in list(value.items()):
                self(key)
                known = self._known.get(id(key)) if isinstance(key, torch.nn.Parameter) else None
                own[key if known is None else known[1]] = self(entry)
        elif isinstance(value, set):
            self._take_parts(value)
            own.update(value)
        else:
            own.extend(self(entry) for entry in list(value))
        if type(value) not in CONTAINERS:
            own.__dict__.update(value.__dict__)
        return own

    def _take_parts(self, value: set[Any] | frozenset[Any]) -> None:
        """What is in a set stays the same objects."""
        for part in () if self._in_order else list(value):
            if not isinstance(part, torch.Tensor | tuple):
                self(part)

    def _with_attributes(self, value: Any) -> Any:
        """None of the methods of its class is called."""
        base = base_of(value)
        own = self._note(value, base.__new__(type(value)))
        if base is set:
            self._take_parts(value)
        entries = list(value) if base is set else [self(entry) for entry in list(value)]
        base.__init__(own, entries, *([value.maxlen] if base is collections.deque else ()))
        own.__dict__.update({name: self(held) for name, held in list(value.__dict__.items())})
        return own

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        """A handle removes from the replica's own dict of hooks."""
        own = RemovableHandle.__new__(RemovableHandle)
        own.__dict__.update(value.__dict__)
        hooks = value.hooks_dict_ref()
        if hooks is not None:
            own.hooks_dict_ref = weakref.ref(self(hooks))
        return self._note(value, own)  # type: ignore[no-any-return]


@contextlib.contextmanager
def made_like(value: torch.Tensor) -> Iterator[None]:
    """What is made here can be trained if ``value`` can be, also where the program has entered inference mode."""
    with torch.inference_mode(torch.is_inference_mode_enabled() and value.is_inference()), torch.no_grad():
        yield


def copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same values and layout in memory of its own."""
    with made_like(value):
        own = value.detach()
        return own.clone() if own.device == device else own.to(device)


def move_in_place(tensor: torch.Tensor, home: torch.device) -> None:
    """Moves a parameter or buffer to another device; the object stays."""
    if tensor.device == home or isinstance(tensor, torch.nn.UninitializedParameter):
        return
    with torch.no_grad():
        moved = tensor.detach().to(home)
        moved.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            moved.grad = tensor.grad.to(home)
        torch.clear_autocast_cache()  # it may refer to the inside
        torch_internals.swap_insides(tensor, moved)
