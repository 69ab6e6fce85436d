"""A second chief for the same tasks, and coordinators that have ended: whoever waits for the first one is told."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import tfstyle_dist as td
from tfstyle_dist.coordinator import closure_queue
from tfstyle_dist.coordinator.closure_queue import ClosureQueue
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CancelledError, UnavailableError

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def displaced(c: Any) -> tuple[Any, Any]:
    """Strategy and coordinator of a chief; after it a second one was started for the same tasks."""
    first = c.strategy, c.coordinator
    c.make_coordinator()
    return first


def test_a_chief_that_was_replaced_is_told_and_leaves_the_second_one_alone(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        old = td.Variable(1.0)
    assert c.coordinator.schedule(lambda: float(old.value())).get(timeout=30) == 1.0
    results = [c.coordinator.schedule(time.sleep, args=(0.05,)) for _ in range(200)]
    strategy, coordinator = displaced(c)
    try:
        with c.strategy.scope():
            new = td.Variable(5.0)
        with pytest.raises(UnavailableError, match="works for another coordinator now"):
            coordinator.join(timeout=30)
        with pytest.raises((CancelledError, UnavailableError)):
            results[-1].get(timeout=30)
        with pytest.raises(UnavailableError, match="works for another coordinator now"):
            coordinator.schedule(time.sleep, args=(0.0,))
        assert coordinator.done()
        for _ in range(2):  # it connects anew, and must not take the server back
            with pytest.raises((CancelledError, UnavailableError), match=r"works for another coordinator now|closed"):
                old.value()
    finally:
        strategy.close()
    assert c.coordinator.schedule(lambda: float(new.value())).get(timeout=30) == 5.0


def test_a_chief_without_work_is_told_when_it_schedules(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    assert c.coordinator.schedule(max, args=(1, 2)).get(timeout=30) == 2
    strategy, coordinator = displaced(c)
    try:
        assert c.coordinator.schedule(max, args=(1, 3)).get(timeout=30) == 3
        with pytest.raises(UnavailableError, match="works for another coordinator now"):
            coordinator.schedule(max, args=(1, 4)).get(timeout=30)
    finally:
        strategy.close()


def test_whoever_waits_for_a_coordinator_that_is_closed_is_told(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    running, waiting = (c.coordinator.schedule(time.sleep, args=(600.0,)) for _ in range(2))
    found: list[BaseException] = []

    def join() -> None:
        try:
            c.coordinator.join()
        except CancelledError as error:
            found.append(error)

    waiter = threading.Thread(target=join, daemon=True)
    waiter.start()
    c.coordinator.close()
    waiter.join(30)
    assert "closed" in str(found[0])
    for result in (running, waiting):
        with pytest.raises(CancelledError):
            result.get(timeout=30)
    with pytest.raises(CancelledError, match="closed"):
        c.coordinator.schedule(time.sleep, args=(0.0,))
    c.coordinator.join()
    c.kill("worker", 0)


def test_an_error_is_raised_although_another_function_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A join without a limit, too."""
    monkeypatch.setattr(closure_queue, "_LET_END", timedelta(seconds=0.1))
    queue = ClosureQueue()
    for _ in range(2):
        queue.put(1, [], None)
    first = queue.take(0)
    assert first is not None
    assert queue.take(0) is not None
    queue.fail(first, ValueError("on purpose"))
    with pytest.raises(ValueError, match="on purpose"):
        queue.wait(Deadline(None), lambda: "")


def test_a_second_chief_does_not_delete_the_snapshots_of_the_first_one(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same program was started twice by mistake."""
    options: dict[str, Any] = {"snapshot_folder": tmp_path / "s", "snapshot_seconds": 3600.0}
    c = cluster(workers=1, ps=1, **options)
    with c.strategy.scope():
        value = td.Variable(1.0)
    first, coordinator = c.strategy, c.coordinator
    assert coordinator.schedule(lambda: float(value.value())).get(timeout=30) == 1.0
    files = sorted((tmp_path / "s" / "ps-0").iterdir())
    assert files
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "2")
    with pytest.raises(UnavailableError, match=r"coordinator that lives.*a snapshot_folder and tasks of its own"):
        c.make_coordinator(**options)
    c.strategy.close()
    assert sorted((tmp_path / "s" / "ps-0").iterdir()) == files
    assert coordinator.schedule(lambda: float(value.value())).get(timeout=30) == 1.0
    # Once it is silent, e.g. because it was killed, its successor need not wait long.
    coordinator.close(end_workers=False)
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "30")
    c.make_coordinator(**options)
    first.close()
    assert c.coordinator.schedule(max, args=(1, 2)).get(timeout=30) == 2
