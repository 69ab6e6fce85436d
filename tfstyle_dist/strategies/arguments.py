"""What a user's function is called with: a look at the types, so that a forgotten comma is no other value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_arguments(
    fn: Any, args: Any, kwargs: dict[str, Any] | None, what: str = "run"
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call that takes a function.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        what: the call, for messages.

    Raises:
        TypeError: ``fn`` cannot be called.
        ValueError: the arguments are no list or tuple, or no dict.
    """
    if not callable(fn):
        raise TypeError(f"{what} takes a callable, got {type(fn).__name__}: {fn!r}; pass its arguments as args=.")
    if not isinstance(args, list | tuple):
        raise ValueError(f"args of {what} must be a list or tuple, got {type(args).__name__}; write args=(value,).")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError(
            f"kwargs of {what} must be a dict, got {type(kwargs).__name__}; write kwargs={{'name': value}}."
        )
    return args, kwargs or {}
