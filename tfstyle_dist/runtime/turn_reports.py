"""What is said of replicas in messages: where they wait, where their threads are, and how their calls differ."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError
from tfstyle_dist.core.program_line import program_line
from tfstyle_dist.runtime.replica_run import Action


class Call:
    """What one replica waits in.

    Attributes:
        result: a 1-tuple once the joint work is done.
    """

    __slots__ = ("action", "anywhere", "frame", "joint", "kind", "payload", "result")

    def __init__(self, kind: str, payload: Any, action: Action, anywhere: bool, frame: FrameType) -> None:
        self.kind, self.payload, self.action, self.anywhere, self.frame = kind, payload, action, anywhere, frame
        self.result: tuple[Any] | None = None
        self.joint: Sequence[float] = ()

    def describe(self) -> str:
        """The call and the user's line."""
        line = program_line(self.frame)
        return f"{self.kind} at {line}" if line else self.kind


def other_thread_runs(deadline: Deadline, threads: Sequence[int | None]) -> DeadlineExceededError:
    """The error of a thread that calls ``run`` while the run of another thread goes on and on.

    Args:
        deadline: how long it has waited.
        threads: of all replicas of the run that goes on.
    """
    begun = [replica for replica, thread in enumerate(threads) if thread is not None]
    return DeadlineExceededError(
        f"strategy.run waited {deadline} in the thread {threading.current_thread().name!r} for the run of another "
        "thread, in which no turn has passed meanwhile. One run of a strategy comes after the other, so a step that "
        "waits for a thread which calls strategy.run waits for itself: call run after the step, in the thread that "
        "called it. Set TFSTYLE_TIMEOUT_SECONDS (0: no limit) if the work is just long.\n"
        f"{stacks_of(threads, begun)}"
    )


def given_up(holder: int, threads: Sequence[int | None]) -> str:
    """What the log says when the others go on without the replica that has the turn."""
    stacks = stacks_of(threads, [holder])
    return (
        f"abandoned the thread of replica(s) {[holder]}; it ends at its next instruction of Python. It is at:\n{stacks}"
    )


def stacks_of(threads: Sequence[int | None], replicas: Sequence[int]) -> str:
    """Where the threads of some replicas are right now.

    Args:
        threads: of all replicas.
        replicas: whose stacks are wanted.
    """
    frames = sys._current_frames()
    parts = []
    for replica in replicas:
        frame = frames.get(threads[replica] or -1)
        text = "".join(traceback.format_stack(frame)) if frame is not None else "  (no Python frame)\n"
        parts.append(f"replica {replica} is at:\n{text}")
    return "\n".join(parts)


def differ(calls: Sequence[Call | None], done: Sequence[bool]) -> bool:
    """Whether some replica waits in a call that not all will make; arguments as for ``different_calls``."""
    open_calls = [call for call in calls if call is not None]
    if not open_calls:
        return False
    return any(done) or any(call.kind != open_calls[0].kind for call in open_calls)


def different_calls(calls: Sequence[Call | None], done: Sequence[bool]) -> CollectiveMismatchError:
    """The error of replicas that made different calls.

    Args:
        calls: what each replica waits in.
        done: whose functions are over.
    """
    lines = []
    for replica, call in enumerate(calls):
        if call is not None:
            did = call.describe()
        elif done[replica]:
            did = "finished without another call"
        else:
            did = "has not come to a call yet"
        lines.append(f"  replica {replica}: {did}")
    return CollectiveMismatchError(
        "The replicas made different calls: a different number of merge_call / all_reduce / all_gather calls or "
        "gradient reductions. Every replica must make the same ones in the same order:\n" + "\n".join(lines)
    )


def came_late(
    holder: int, count: int, call: Call | None, timeout: timedelta | None, stacks: str
) -> DeadlineExceededError:
    """The error of a replica that kept its turn for too long.

    Args:
        holder: that replica.
        count: the replicas of this process.
        call: what another one waits in; ``None``: for the end of the others.
        timeout: the limit.
        stacks: where the replica is.
    """
    limit = f"{timeout.total_seconds() if timeout else 0:g} s"
    if call is not None:
        said = f"Replica(s) [{holder}] of {count} did not come to {call.describe()} within {limit}."
    else:
        said = (
            f"Replica(s) [{holder}] did not finish within the limit of {limit} after replica 0 did. Set "
            "TFSTYLE_TIMEOUT_SECONDS (0: no limit) if the work is just long."
        )
    lock = "If it waits for a lock that another replica holds over such a call, release the lock before the call."
    return DeadlineExceededError(f"{said} {lock}\n{stacks}")


def first_is_late(call: Call | None, deadline: Deadline, stacks: str) -> str:
    """What is said of replica 0 when it keeps its turn for too long; arguments as for ``came_late``."""
    where = "a call that all replicas make" if call is None else call.describe()
    return (
        f"replica 0 did not come to {where} within {deadline}. It runs in the thread that called run, which cannot be "
        f"abandoned: the error is raised when its function returns.\n{stacks}"
    )


_ONE_FOR_ALL: Mapping[tuple[type[BaseException], str], str] = {
    (ValueError, "generator already executing"): "The replicas of one process share a generator: while one of them "
    "waits for the others in it, as in backward(), no other one can go on with it. Write the step as a function that "
    "is called for each batch, and keep what goes on from step to step in attributes of a module, or of an object that "
    "holds the model and the optimizer (docs/replicas.md).",
    (RuntimeError, "This event loop is already running"): "The replicas of one process share an event loop: while one "
    "of them waits for the others in it, as in backward(), no other one can run it. Write asyncio.run(...) in the "
    "step, which makes a loop for each call, or call backward() outside of the coroutine (docs/replicas.md).",
    (RuntimeError, "Nested forward mode AD is not supported at the moment"): "torch has one level of forward mode for "
    "the process: while one replica waits for the others in dual_level(), as in backward() or all_reduce(), no other "
    "one can enter it. Leave it before, or use torch.func.jvp (docs/replicas.md).",
}
"""What is said of errors that come of what is one for all replicas of a process, by class and message."""

_OF_A_THREAD = (
    "A threading.local is empty in the threads of all replicas but the first one. Set what it has in the step, or keep "
    "it in a context variable (contextvars) or in an attribute of a module (docs/replicas.md)."
)


def explain_what_is_one(error: BaseException, count: int) -> None:
    """Adds a note to the error of a replica that used something in which another one waits, such as a generator.

    Args:
        error: which a step function raised.
        count: the replicas of this process.
    """
    why = next((why for (kind, said), why in _ONE_FOR_ALL.items() if type(error) is kind and error.args == (said,)), "")
    if isinstance(error, AttributeError) and isinstance(error.obj, threading.local):
        why = _OF_A_THREAD
    if count > 1 and why:
        error.add_note(f"[tfstyle_dist] {why}")
