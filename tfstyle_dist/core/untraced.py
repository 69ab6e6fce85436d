"""Functions that ``torch.compile`` leaves alone, though a compiled function calls them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: neither the function nor what it calls is traced.

    As ``torch.compiler.disable``, which takes seconds to import what it needs: this uses it where a program has
    imported that already, and only there can anything be compiled.

    Args:
        function: any.
    """
    kept_out: list[Callable[P, R]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kept_out:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            kept_out.append(_disabled(function))
        return kept_out[0](*args, **kwargs)

    return called


def _disabled(function: Callable[P, R]) -> Callable[P, R]:
    import torch

    wrapped: Callable[P, R] = torch.compiler.disable(function)
    return wrapped
