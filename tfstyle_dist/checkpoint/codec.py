"""Python values as JSON, with their tensors kept apart under names: nothing in an index file can be executed."""

from __future__ import annotations

import base64
import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container
from typing import Any

import torch

from tfstyle_dist.core import sparse_parts

Put = Callable[[str, torch.Tensor], str]
Get = Callable[[str], torch.Tensor]
Build = Callable[[Any, list[torch.Tensor]], torch.Tensor]

_SPARSE, _PART = "$sparse", " part "
_PLAIN = (type(None), bool, int, float, str)
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_BOUNDED = "$deque_of"
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", deque: "$deque"}
_MAPPING_TYPES: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
_SEQUENCE_TYPES: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _SEQUENCES.items()}


def encode(value: Any, path: str, put: Put) -> Any:
    """``value`` as something that JSON can hold.

    Args:
        value: numbers, texts, tensors, and the containers of Python around them.
        path: where it is, for names and messages.
        put: keeps a tensor and returns the name under which it is found again.

    Raises:
        TypeError: something else is in it; the message says where.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, put)
    if kind is list:
        return [encode(entry, f"{path}/{i}", put) for i, entry in enumerate(value)]
    if kind in _MAPPINGS:
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(entry, f"{path}/{key}", put) for key, entry in value.items()}
        pairs = [[encode(k, f"{path} (a key)", put), encode(v, f"{path}/{k}", put)] for k, v in value.items()]
        return {_MAPPINGS[kind]: pairs}
    if kind is deque and value.maxlen is not None:
        return {_BOUNDED: [value.maxlen, encode(list(value), path, put)]}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [encode(entry, f"{path}/{i}", put) for i, entry in enumerate(value)]}
    return _encode_rare(value, path, put)


def _encode_tensor(value: torch.Tensor, path: str, put: Put) -> Any:
    if sparse_parts.is_plain(value):
        return {"$tensor": put(path, value)}
    if not sparse_parts.is_sparse(value):
        nested = "nested " if value.is_nested else ""
        raise TypeError(
            f"{path} is a {nested}tensor of layout {value.layout} and type {value.dtype}, which a checkpoint cannot "
            "hold. Make it dense, or keep it out of the checkpoint, a buffer by persistent=False."
        )
    parts = [put(f"{path}{_PART}{i}", part) for i, part in enumerate(sparse_parts.parts_of(value))]
    return {_SPARSE: [sparse_parts.about(value), parts]}


def is_part(name: str) -> bool:
    """Whether a tensor is a part of a sparse one, which may have another number of elements on each worker."""
    return name[:-1].endswith(_PART)


def _encode_rare(value: Any, path: str, put: Put) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$tuple": list(value)}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, path, put)
    if isinstance(value, dict):
        return encode(dict(value), path, put)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        f"{str(value)[:80]}. Checkpoints hold modules, optimizers, variables, tensors, objects with state_dict() and "
        "load_state_dict(), numbers, texts, and lists, tuples, sets and dicts of these."
    )


def _encode_numpy(value: Any, path: str, put: Put) -> Any:
    """Without importing numpy: whoever made the value has it."""
    kind = getattr(value, "dtype", type(value).__name__)
    try:
        if hasattr(value, "ctypes"):  # an array, also one without dimensions
            return {"$ndarray": put(path, torch.from_numpy(value.copy()))}
        plain = value.item()
    except (AttributeError, TypeError) as error:
        raise TypeError(_no_numbers(path, kind)) from error
    if type(plain) is type(value):
        raise TypeError(_no_numbers(path, kind))
    return encode(plain, path, put)


def _no_numbers(path: str, kind: Any) -> str:
    return (
        f"{path} is a value of numpy of type {kind}, which torch has not and a checkpoint cannot hold. Give numbers of "
        "a type that torch has, such as float64, or a list of texts."
    )


def decode(tree: Any, get: Get, build: Build = sparse_parts.assemble) -> Any:
    """What ``encode`` was given.

    Args:
        tree: the result of ``encode``.
        get: the tensor of a name.
        build: makes a sparse tensor of what is known of it and its parts.

    Raises:
        ValueError: ``encode`` makes nothing like that; see ``check``.
    """
    if isinstance(tree, list):
        return [decode(entry, get, build) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1 or not (mark := next(iter(tree))).startswith("$"):
        return {key: decode(entry, get, build) for key, entry in tree.items()}
    inner = tree[mark]
    if mark == "$tensor":
        return get(inner)
    if mark in _MAPPING_TYPES:
        pairs = map(_listed, _listed(inner))
        return _MAPPING_TYPES[mark]([(decode(k, get, build), decode(v, get, build)) for k, v in pairs])
    if mark in _SEQUENCE_TYPES:
        return _SEQUENCE_TYPES[mark]([decode(entry, get, build) for entry in _listed(inner)])
    if mark == _BOUNDED:
        longest, entries = _listed(inner)
        return deque(decode(_listed(entries), get, build), longest)
    if mark == _SPARSE:
        about, names = map(_listed, _listed(inner))
        return build(about, [get(name) for name in names])
    if mark not in _RARE:
        raise ValueError(f"{mark[:80]!r} is no kind of value")
    return _RARE[mark](inner, get)


def with_factories(value: Any, there: Any) -> Any:
    """A decoded value, in which what was a ``defaultdict`` is one again: functions are not saved.

    Args:
        value: what ``decode`` gives: a dict for it.
        there: what the value takes the place of, which has the functions.
    """
    if isinstance(value, list) and isinstance(there, list):
        return [with_factories(*pair) for pair in zip(value, there, strict=False)] + value[len(there) :]
    if type(value) is not dict or not isinstance(there, dict):
        return value
    makes = there.default_factory if isinstance(there, defaultdict) else None
    for key, entry in value.items():
        if isinstance(entry, dict | list) and (key in there or makes is not None):
            value[key] = with_factories(entry, makes() if makes is not None and key not in there else there[key])
    if not isinstance(there, defaultdict):
        return value
    kept = copy.copy(there)
    kept.clear()
    kept.update(value)
    return kept


_RARE: dict[str, Callable[[Any, Get], Any]] = {
    "$bytes": lambda inner, get: base64.b64decode(inner, validate=True),
    "$complex": lambda inner, get: complex(*_listed(inner)),
    "$dtype": lambda inner, get: _dtype(inner),
    "$device": lambda inner, get: torch.device(inner),
    "$ndarray": lambda inner, get: get(inner).numpy(),
}


def check(tree: Any, tensors: Container[str]) -> None:
    """Finds out whether ``decode`` understands a value.

    Args:
        tree: what is to be the result of ``encode``.
        tensors: names of the tensors there are.

    Raises:
        ValueError: it does not; the message says why.
    """

    def get(name: str) -> torch.Tensor:
        if not isinstance(name, str) or name not in tensors:
            raise ValueError(f"there is no tensor {str(name)[:80]!r}")
        return torch.empty(0, device="cpu")

    def build(about: Any, parts: list[torch.Tensor]) -> torch.Tensor:
        sparse_parts.check(about, len(parts))
        return torch.empty(0, device="cpu")

    try:
        decode(tree, get, build)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"it is no value that a checkpoint holds: {why}") from None


def _listed(inner: Any) -> list[Any]:
    if not isinstance(inner, list):
        raise ValueError(f"{str(inner)[:80]} is no list")
    return inner


def _dtype(name: Any) -> torch.dtype:
    if not is_dtype(name):
        raise ValueError(f"{str(name)[:80]!r} is no element type")
    found: torch.dtype = getattr(torch, name)
    return found


def is_dtype(name: Any) -> bool:
    """Whether it is the name of an element type, e.g. ``"float32"``."""
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)


def tensor_names(tree: Any) -> list[str]:
    """The names of the tensors in an encoded value, in order."""
    if isinstance(tree, list):
        return [name for entry in tree for name in tensor_names(entry)]
    if not isinstance(tree, dict):
        return []
    if len(tree) == 1 and (mark := next(iter(tree))) in ("$tensor", "$ndarray"):
        return [tree[mark]]
    if tree.keys() == {_SPARSE}:
        return list(tree[_SPARSE][1])
    return [name for entry in tree.values() for name in tensor_names(entry)]


def sparse_in(tree: Any) -> list[Any] | None:
    """What is known of a sparse tensor that was encoded, as ``sparse_parts.about`` gives it; ``None`` of all else."""
    return tree[_SPARSE][0] if isinstance(tree, dict) and tree.keys() == {_SPARSE} else None
