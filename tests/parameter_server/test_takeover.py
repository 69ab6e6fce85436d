"""A second chief for the same tasks, and coordinators that have ended: whoever waits for the first one is told."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import cloudpickle
import pytest

import tfstyle_dist as td
from tfstyle_dist.coordinator import closures
from tfstyle_dist.coordinator.closures import ClosureQueue
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CancelledError, UnavailableError

pytestmark = pytest.mark.timeout(60)
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
    monkeypatch.setattr(closures, "_LET_END", timedelta(seconds=0.1))
    queue = ClosureQueue()
    for _ in range(2):
        queue.put(1, [], None)
    first = queue.take(0)
    assert first is not None
    assert queue.take(0) is not None
    queue.fail(first, ValueError("on purpose"))
    with pytest.raises(ValueError, match="on purpose"):
        queue.wait(Deadline(None), lambda: "")
