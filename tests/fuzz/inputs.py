"""What comes from outside, as hypothesis draws it, and how much of it.

A parser may give a value or raise one of the errors that its documentation names. The memory that it may take is
limited by ``conftest.py``, its time by the limit of the test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings, strategies as st

EXAMPLES = int(os.environ.get("TFSTYLE_FUZZ_EXAMPLES", "0"))
"""How many inputs each test draws; 0: a few, the same ones every time."""


def bounded(examples: int) -> Callable[[Any], Any]:
    """How often a test draws.

    Args:
        examples: how often, unless ``TFSTYLE_FUZZ_EXAMPLES`` says otherwise.
    """
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,  # so that nothing random fails a change that has nothing to do with it
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


texts = st.text(max_size=12) | st.sampled_from(["", "0", "-1", "²", "\0", "../..", "worker", "h:1", "\ud800", "nan"])
numbers = st.integers() | st.sampled_from([0, 1, -1, 1 << 31, 1 << 63, 10**18, 10**400])
scalars = st.none() | st.booleans() | numbers | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
"""Anything that JSON can hold."""

DEEP = "[" * 100_000
WIDE_NUMBER = "9" * 5_000
odd_json = st.sampled_from([DEEP, DEEP + "]" * 100_000, '{"a":' * 50_000, WIDE_NUMBER, "NaN", "-Infinity", "1e999", ""])


def json_texts(likely: st.SearchStrategy[Any] = values) -> st.SearchStrategy[str]:
    """JSON, nearly JSON, and other texts.

    Args:
        likely: values that the parser may take.
    """
    written = (likely | values).map(json.dumps)
    cut = st.tuples(written, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    return written | cut | odd_json | texts


@st.composite
def nearly(draw: Callable[[Any], Any], whole: bytes) -> bytes:
    """Bytes that were well formed before some were changed, cut out, put in or appended."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "put", "end", "append"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 40))]
        elif kind == "put":
            data[place:place] = draw(st.binary(min_size=1, max_size=20))
        elif kind == "end":
            del data[place:]
        elif kind == "append":
            data += draw(st.binary(min_size=1, max_size=20))
    return bytes(data)


@st.composite
def altered(draw: Callable[[Any], Any], whole: Any) -> Any:
    """A value of JSON that was well formed before some parts of it became something else, or went."""
    value = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        inner, path = value, []
        while isinstance(inner, dict | list) and inner and draw(st.integers(0, 4)):
            key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
            path.append((inner, key))
            inner = inner[key]
        if not path:
            value = draw(values)
            continue
        owner, key = path[-1]
        if draw(st.booleans()):
            owner[key] = draw(values)
        else:
            del owner[key]
    return value
