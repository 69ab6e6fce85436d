"""What the parameter server benchmarks measure on a coordinator, of this package or TensorFlow's; imports neither."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def throughput(coordinator: Any, fn: Callable[[], Any], workers: int, seconds: float) -> float:
    """Median of three runs, in functions per second."""

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(fn)
        coordinator.join()
        return count / (time.perf_counter() - begin)

    run(4 * workers)
    count = max(10, int(run(4 * workers) * seconds / 3))
    return statistics.median(run(count) for _ in range(3))


def seconds_to_error(coordinator: Any, fn: Callable[[], Any], kill: Callable[[], None]) -> dict[str, Any]:
    """How long ``join`` goes on after ``kill`` has ended the server in the middle of 400 functions."""
    for _ in range(400):
        coordinator.schedule(fn)
    time.sleep(0.1)
    kill()
    begin = time.perf_counter()
    try:
        coordinator.join()
    except Exception as error:
        return {"seconds_to_error": time.perf_counter() - begin, "error": type(error).__name__}
    raise RuntimeError("join() did not notice that the server was killed")
