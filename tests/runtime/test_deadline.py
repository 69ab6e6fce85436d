"""Deadlines, and the debugger that stops their clock."""

from __future__ import annotations

import threading
import types
from datetime import timedelta

import pytest

from tfstyle_dist.core import deadline as module
from tfstyle_dist.core.deadline import Deadline, debugger_active


def test_without_limit() -> None:
    deadline = Deadline(None)
    assert not deadline.passed()
    assert deadline.remaining() is None
    assert deadline.pause() is None
    assert str(deadline) == "no deadline"


def test_with_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    deadline = Deadline(timedelta(seconds=2.5))
    assert str(deadline) == "2.5 s"
    assert deadline.remaining() == 2.5
    now[0] = 102.0
    assert not deadline.passed()
    assert deadline.remaining() == 0.5
    now[0] = 103.0
    assert deadline.passed()
    assert deadline.remaining() == 0.0


def test_a_debugger_stops_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now, prompt = [0.0], [True]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "debugger_active", lambda: prompt[0])
    deadline = Deadline(timedelta(seconds=2))
    now[0] = 10.0
    assert not deadline.passed()
    assert deadline.remaining() == 2.0  # as much as at the start, from now on
    prompt[0] = False
    now[0] = 12.5
    assert deadline.passed()


def test_time_is_left_to_whoever_leaves_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left between two looks, the last before the end too: the next look must not find the time up."""
    now, left_at = [0.0], 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "debugger_active", lambda: now[0] < left_at)
    for step in range(100):
        now[0], left_at = 0.0, 0.1 * step
        deadline = Deadline(timedelta(seconds=2))
        while not deadline.passed():
            pause = deadline.pause()
            assert pause is not None
            now[0] += pause
        assert left_at + 1.5 <= now[0] < max(left_at, 0.5) + 2.1


def test_debugger_active_in_another_thread() -> None:
    """A thread inside a function ``interaction`` of a file called pdb counts."""
    here, leave = threading.Event(), threading.Event()
    code = compile("def interaction(here, leave):\n    here.set()\n    leave.wait(30)\n", "/usr/lib/pdb.py", "exec")
    namespace = types.SimpleNamespace()
    exec(code, namespace.__dict__)
    assert not debugger_active()
    thread = threading.Thread(target=namespace.interaction, args=(here, leave))
    thread.start()
    assert here.wait(20)
    assert debugger_active()
    leave.set()
    thread.join(20)
    assert not debugger_active()
