"""Which strategy, and which replica, a thread is working for.

Each thread has a stack of frames. A frame is either cross-replica (inside ``scope()`` or ``merge_call``) or belongs to
one replica (inside ``run``). An empty stack means: the default strategy's replica context, or the strategy that
``experimental_set_strategy`` made global.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any


class Frame:
    """One entry of a thread's stack.

    Attributes:
        strategy: the strategy in force.
        replica: its ReplicaContext; ``None`` in cross-replica context.
        component: local replica whose copies are being updated (``extended.update``); ``None`` outside updates. Writes
            made in such a frame are the update itself.
    """

    __slots__ = ("component", "replica", "strategy")

    def __init__(self, strategy: Any, replica: Any = None, component: int | None = None) -> None:
        self.strategy, self.replica, self.component = strategy, replica, component


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()
_global_frame: Frame | None = None


def current_frame() -> Frame | None:
    """The innermost frame of this thread, or the global strategy's; ``None`` outside everything."""
    frames = _stack.frames
    return frames[-1] if frames else _global_frame


def set_global_strategy(strategy: Any | None) -> None:
    """Makes ``strategy`` the one in force wherever no scope is entered; ``None`` clears it."""
    global _global_frame
    _global_frame = None if strategy is None else Frame(strategy)


class entered:
    """Context manager that puts a frame on this thread's stack.

    Leaving it also drops whatever an interrupted update left above the frame.

    Args:
        frame: what holds inside the block.
    """

    __slots__ = ("_depth", "_frame")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._depth = 0

    def __enter__(self) -> Frame:
        """Pushes the frame."""
        self._depth = len(_stack.frames)
        _stack.frames.append(self._frame)
        return self._frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Pops the frame."""
        del _stack.frames[self._depth :]


def push(frame: Frame) -> None:
    """Puts a frame on this thread's stack; ``pop`` takes it away again."""
    _stack.frames.append(frame)


def pop(frame: Frame) -> None:
    """Drops ``frame`` and everything above it; nothing when it is not there any more."""
    if frame in _stack.frames:
        del _stack.frames[_stack.frames.index(frame) :]


def mixing_error(inner: Any, outer: Any, what: str) -> RuntimeError:
    """The error for two strategies at work in one thread."""
    return RuntimeError(
        f"Mixing different tf.distribute strategies: {what} of {inner!r} while {outer!r} is in force. Leave the scope "
        "or run of the one before using the other."
    )
