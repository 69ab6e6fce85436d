"""What a worker did not look is no silence of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfstyle_dist.elastic.connections import failure_detector
from tfstyle_dist.elastic.options import Elastic


@pytest.mark.parametrize("pause", [0.2, 0.9, 0.97, 1.0, 1.1, 3.0])
def test_a_process_that_stood_still_gives_nobody_up(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(failure_detector.time, "monotonic", lambda: now[0])
    watch = failure_detector.FailureDetector(0, Elastic(replicas=2, suspect_after=1.0, beat_every=0.1), "here")
    connection: Any = SimpleNamespace(heard=99.95, doubtful_until=0.0, peer={"place": "elsewhere"}, rank=1)
    now[0] += pause
    paused = watch.paused([connection], now[0])
    assert watch.why_lost(connection, now[0], paused) == ""
    assert connection.heard <= now[0]


@pytest.mark.parametrize("look", [0.05, 0.11, 0.3])
def test_whoever_is_silent_is_given_up_however_often_others_look(look: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(failure_detector.time, "monotonic", lambda: now[0])
    watch = failure_detector.FailureDetector(0, Elastic(replicas=2, suspect_after=1.0, beat_every=0.1), "here")
    connection: Any = SimpleNamespace(heard=100.0, doubtful_until=0.0, peer={"place": "elsewhere"}, rank=1)
    said = ""
    while not said and now[0] < 105:
        now[0] += look
        paused = watch.paused([connection], now[0])
        said = watch.why_lost(connection, now[0], paused)
    assert "was silent for" in said
    assert now[0] > 101
