"""Functions that ``torch.compile`` leaves alone, though a compiled function calls them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: neither the function nor what it calls is traced.

    As ``torch.compiler.disable``, which takes seconds to import what it needs: this uses it where a program has
    imported that already, and only there can anything be compiled.

    Args:
        function: takes positional arguments.
    """
    kept_out: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        if not kept_out:
            if "torch._dynamo" not in sys.modules:
                return function(*args)
            kept_out.append(_disabled(function))
        return kept_out[0](*args)

    return called


def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    wrapped: Callable[..., Any] = torch.compiler.disable(function)
    return wrapped
