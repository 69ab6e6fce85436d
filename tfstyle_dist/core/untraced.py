"""Functions that ``torch.compile`` leaves alone, though a compiled function calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tfstyle_dist.core import torch_internals

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """A decorator: neither the function nor what it calls is traced.

    As ``torch.compiler.disable``, but that takes seconds to import what it needs. Each ``__torch_function__`` must be
    such a function: where torch 2.13 and 2.15 trace one and leave a part of it to Python, they make wrong numbers of
    the rest.

    Args:
        function: any that is written in Python.
    """
    setattr(function, torch_internals.UNTRACED, True)
    torch_internals.run_as(function.__code__, torch_internals.IN_PYTHON)
    return function
