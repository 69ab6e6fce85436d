"""What a user's function is called with: a look at the types, so that a forgotten comma is no other value."""

from __future__ import annotations

import inspect
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


def explain_arguments(error: BaseException, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Adds a note to a TypeError of a call that could not begin, since ``args`` do not fit the function."""
    if not isinstance(error, TypeError):
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except Exception:  # of C, without a signature, or one that cannot be made
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        batch = len(args) == 1 and isinstance(args[0], list | tuple)
        hint = "args=tuple(batch) gives the parts of a batch" if batch else "args=(batch,) gives it as one argument"
        error.add_note(
            f"[tfstyle_dist] {getattr(fn, '__name__', fn)}{signature} was called with the {len(args)} entries of args; "
            f"{hint}."
        )
