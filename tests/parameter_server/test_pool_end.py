"""The coordinator's thread ends while somebody wakes it."""

from __future__ import annotations

import os
import time

import pytest

from tfstyle_dist.coordinator.closures import ClosureQueue
from tfstyle_dist.coordinator.pool import WorkerPool
from tfstyle_dist.parameter_server import zmq_link

pytestmark = pytest.mark.timeout(60)


def test_it_is_woken_after_it_has_noticed_that_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.eventfd_write

    def late(event: int, value: int) -> None:
        time.sleep(0.8)  # longer than the thread sleeps
        write(event, value)

    context = zmq_link.Context(None)
    pool = WorkerPool(context, [], [], {}, ClosureQueue(), {}, {})
    try:
        monkeypatch.setattr(os, "eventfd_write", late)
        pool.stop()
        pool.stop()
        pool.wake()
        assert not pool._thread.is_alive()
    finally:
        context.close()
