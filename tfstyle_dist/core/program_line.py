"""The line of the user's program from which something was called, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

_NOT_THE_USERS = {
    "tfstyle_dist",
    "torch",
    "contextlib",
    "threading",
    # Libraries with loops of their own, under which users' programs run.
    "accelerate",
    "keras",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "transformers",
}


def program_line(frame: FrameType | None) -> str:
    """The innermost line of a stack outside this package, torch and what calls a strategy for the user.

    Args:
        frame: where the stack begins.

    Returns:
        ``file:line``; empty if there is none.
    """
    for one in stack_from(frame):
        if one.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS:
            return f"{one.f_code.co_filename}:{one.f_lineno}"
    return ""


def stack_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
