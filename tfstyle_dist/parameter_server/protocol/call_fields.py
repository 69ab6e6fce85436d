"""The named values of a call, checked: what a server is asked to make, before it makes any of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol.header import ProtocolError
from tfstyle_dist.parameter_server.protocol.operations import DTYPES

_MOST_BYTES = 1 << 48
_MOST_SEED = 1 << 42


def number(meta: Mapping[str, Any], name: str, most: int = 1 << 63) -> int:
    """A whole number from 0 on.

    Args:
        meta: of the call.
        name: of the value.
        most: it is below this number.

    Raises:
        ProtocolError: there is none, or it is something else.
    """
    value = meta.get(name)
    if type(value) is not int or not 0 <= value < most:
        raise ProtocolError(f"{name!r} is a whole number from 0 to {most - 1}, not {str(value)[:80]!r}")
    return value


def entries(meta: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of groups of named values.

    Raises:
        ProtocolError: there is none, or it is something else.
    """
    value = meta.get(name)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ProtocolError(f"{name!r} is a list of objects, not {str(value)[:80]!r}")
    return value


@dataclass(frozen=True)
class NewVariable:
    """A variable that is to be made.

    Attributes:
        number: of the variable.
        name: of it.
        shape: of its rows on this server.
        dtype: of its elements.
        value: its elements, flat; ``None`` if ``fill`` says what they are.
        fill: ``"constant"``, ``"normal"`` or ``"uniform"`` with two numbers and a seed.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: torch.Tensor | None
    fill: tuple[str, float, float, int] | None

    @classmethod
    def of(cls, entry: Mapping[str, Any], part: Any) -> NewVariable:
        """From an entry of a call.

        Args:
            entry: named values.
            part: the bytes of its elements; empty with ``fill``.

        Raises:
            ProtocolError: something is missing, or does not fit together.
        """
        shape = entry.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < _MOST_BYTES for size in shape):
            raise ProtocolError(f"a shape is a list of sizes, not {str(shape)[:80]!r}")
        dtype, numel = DTYPES[number(entry, "dtype", len(DTYPES))], math.prod(shape)
        fill = _fill(entry["fill"]) if "fill" in entry else None
        needed = numel * dtype.itemsize
        if needed >= _MOST_BYTES or len(part) != (needed if fill is None else 0):
            raise ProtocolError(f"a variable of shape {str(shape)[:80]} and {dtype} came with {len(part)} bytes")
        value = None
        if fill is None:
            data = torch.frombuffer(bytearray(part), dtype=torch.uint8) if needed else torch.empty(0, dtype=torch.uint8)
            value = data.view(dtype)
        return cls(number(entry, "number"), str(entry.get("name")), tuple(shape), dtype, value, fill)


def _fill(given: Any) -> tuple[str, float, float, int]:
    if isinstance(given, Sequence) and len(given) == 4 and given[0] in ("constant", "normal", "uniform"):
        kind, first, second, seed = given
        plain = all(type(value) in (int, float) and abs(value) < 1e300 for value in (first, second))
        ordered = plain and (kind == "constant" or second >= (0 if kind == "normal" else first))
        if ordered and type(seed) is int and abs(seed) < _MOST_SEED:
            return kind, float(first), float(second), seed
    raise ProtocolError(
        "first values are ['constant', value, 0, 0], ['normal', mean, deviation, seed] or ['uniform', low, high, seed]"
        f", not {str(given)[:80]!r}"
    )
