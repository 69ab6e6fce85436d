"""Which strategy, and which replica, a thread is working for.

Each thread has a stack of frames. A frame is either cross-replica (inside ``scope()`` or ``merge_call``) or belongs to
one replica (inside ``run``). An empty stack means: the default strategy's replica context, or the strategy that
``experimental_set_strategy`` made global.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.runtime.clocks import WAIT
from tfstyle_dist.runtime.replica_run import Action
from tfstyle_dist.values.shares import Share

if TYPE_CHECKING:
    from tfstyle_dist.runtime.worker import Worker


class StrategyInForce(Protocol):
    """What the rooms below ``strategies`` ask of a strategy; its parts are theirs, so they know them better."""

    worker: Worker
    parameter_store: Any
    gradient_reducer: Any
    update_runner: Any
    cross_device_ops: Any
    first_replica_is_global: bool
    closed: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""

    @property
    def adopts_modules(self) -> bool:
        """Whether modules built in its scope are taken over."""

    def create_variable(self, spec: Any) -> Any:
        """Makes a variable that this strategy owns."""


class Replica(Protocol):
    """One replica in its context, as the rooms below ``strategies`` know it: a ``ReplicaContext``."""

    local_replica_id: int
    share: Share | None

    @property
    def strategy(self) -> StrategyInForce:
        """The strategy that runs."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""

    @property
    def replica_id(self) -> int:
        """This replica's number among them."""

    def barrier(self, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False) -> Any:
        """Waits for all local replicas; arguments as for ``ReplicaRun``."""

    def begin_update(self) -> None:
        """An optimizer of this replica begins a step; see ``ReplicaRun``."""

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """The sum or mean of the replicas' values."""

    def all_gather(self, value: Any, axis: int) -> Any:
        """The replicas' values in replica order, along one axis."""


class Frame:
    """One entry of a thread's stack.

    Attributes:
        strategy: the strategy in force.
        replica: the replica; ``None`` in cross-replica context.
        component: local replica whose copies are being updated (``extended.update``); ``None`` outside updates. Writes
            made in such a frame are the update itself.
    """

    __slots__ = ("component", "replica", "strategy")

    def __init__(self, strategy: StrategyInForce, replica: Replica | None = None, component: int | None = None) -> None:
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


def current_replica() -> Replica | None:
    """The replica that this thread runs; ``None`` in cross-replica context and outside everything."""
    frame = current_frame()
    return None if frame is None else frame.replica


def replica_of(strategy: StrategyInForce) -> Replica | None:
    """The replica of a strategy that this thread runs; ``None``: none of its."""
    frame = current_frame()
    return frame.replica if frame is not None and frame.strategy is strategy else None


def set_global_strategy(strategy: StrategyInForce | None) -> None:
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

    def __exit__(self, *error: object) -> None:
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
