"""Tasks that die, stop, come back or misbehave, all of them real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation
from tfstyle_dist.parameter_server.protocol.work import Work

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ten_thousand_additions_under_random_kills_are_ten_thousand(cluster: Any) -> None:
    c = cluster(workers=3, ps=2)
    with c.strategy.scope():
        counts = [td.Variable(0, dtype=torch.int64) for _ in range(2)]

    def add() -> None:
        counts[0].assign_add(1)
        counts[1].assign_add(1)

    for _ in range(10_000):
        c.coordinator.schedule(add)
    with c.random_kills({"worker": 3}, seconds=0.3, seed=0, progress=500) as kills:
        c.coordinator.join(timeout=200)
    assert kills[0] > 3
    assert [int(v) for v in counts] == [10_000, 10_000]
    # The kills hit functions whose writes had been made: without their numbers they would have counted twice.
    assert sum(s["applied"] for s in c.statistics()) == 20_000
    # What a server keeps of a worker is given up when the worker comes back: two links of the coordinator, one of each.
    assert all(s["clients"] <= 2 + 3 for s in c.statistics())


def test_a_repeated_function_does_not_repeat_its_writes(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=2)
    with c.strategy.scope():
        small, large = td.Variable(0.0), td.Variable(torch.zeros(300_000))
    marker = tmp_path / "first"

    def write_and_die() -> tuple[float, float]:
        small.assign_add(1.0)
        large.assign_add(torch.ones(300_000))
        seen = float(small.value()), float(large.value().sum())  # both servers have their writes
        if not marker.exists():
            marker.touch()
            import os

            os.kill(os.getpid(), signal.SIGKILL)
        small.assign_add(1.0)
        return seen

    assert c.coordinator.schedule(write_and_die).get(timeout=30) == (1.0, 300_000.0)
    assert float(small.value()) == 2.0
    assert float(large.value().sum()) == 300_000
    assert sum(s["duplicates"] for s in c.statistics()) == 2


def test_a_stopped_worker_is_replaced_and_refused_when_it_wakes(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        count = td.Variable(0.0)
    marker = tmp_path / "stopped"

    def add() -> int:
        if not marker.exists():
            marker.touch()
            import os

            os.kill(os.getpid(), signal.SIGSTOP)
        count.assign_add(1.0)
        return td.coordinator.experimental_get_current_worker_index()

    first = c.coordinator.schedule(add)
    other = first.get(timeout=30)
    c.coordinator.join(timeout=30)
    assert float(count.value()) == 1.0
    c.signal("worker", 1 - other, signal.SIGCONT)
    # It joins again and works on.
    assert c.coordinator.schedule(add, worker=1 - other).get(timeout=30) == 1 - other
    assert float(count.value()) == 2.0


def test_one_function_that_does_not_end_keeps_nothing_of_the_others(cluster: Any, tmp_path: Path) -> None:
    """Neither at the coordinator nor at the servers, which refuse late writes of those that have ended all the same."""
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        count = td.Variable(0.0)
    go_on = tmp_path / "go on"

    def add_later() -> None:
        count.assign_add(1.0)
        while not go_on.exists():
            time.sleep(0.01)
        count.assign_add(1.0)

    long = c.coordinator.schedule(add_later, worker=0)
    waits = c.coordinator.schedule(lambda: count.assign_add(1.0), worker=0)
    results = [c.coordinator.schedule(lambda: count.assign_add(1.0), worker=1) for _ in range(300)]
    for result in results:
        result.get(timeout=30)
    wait_until(lambda: c.statistics()[0]["functions"] < 100)
    assert len(c.coordinator._queue._unfinished) == 2
    link: ServerLink = c.strategy.servers.links[0]
    late = Operation(Op.ADD, 0, count._tfstyle_record.shards[0].number, 0, 0, 4)
    link.post(Work(results[150].number, 1, 0), [late], [torch.ones(1)])
    with pytest.raises(CancelledError, match="is finished"):
        link.finish()
    go_on.touch()
    long.get(timeout=30)
    waits.get(timeout=30)
    c.coordinator.join(timeout=30)
    assert float(count.value()) == 303.0


def test_all_workers_die_and_one_comes_back(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        count = td.Variable(0.0)

    go_on = tmp_path / "go on"

    def add() -> None:
        (tmp_path / f"begun {td.coordinator.experimental_get_current_worker_index()}").touch()
        while not go_on.exists():
            time.sleep(0.01)
        count.assign_add(1.0)

    for _ in range(40):
        c.coordinator.schedule(add)
    wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 2)
    c.kill("worker", 0)
    c.kill("worker", 1)
    assert not c.coordinator.done()
    c.coordinator.schedule(add)
    wait_until(lambda: c.coordinator._pool.absent().startswith(" No worker"))
    with pytest.raises(DeadlineExceededError, match="No worker is there: /job:worker/task:0"):
        c.coordinator.join(timeout=0.5)
    go_on.touch()
    c.start("worker", 1)
    c.coordinator.join(timeout=30)
    assert float(count.value()) == 41.0


def test_a_restarted_worker_starts_its_data_again(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    data = iter(c.coordinator.create_per_worker_dataset(lambda: iter([1.0, 2.0, 3.0])))

    def following(iterator: Any) -> float:
        return next(iterator)

    def schedule() -> float:
        return c.coordinator.schedule(following, args=(data,)).get(timeout=30)

    assert [schedule(), schedule()] == [1.0, 2.0]
    c.kill("worker", 0)
    c.start("worker", 0)
    assert [schedule(), schedule(), schedule()] == [1.0, 2.0, 3.0]
    with pytest.raises(td.errors.OutOfRangeError):
        schedule()
    with pytest.raises(td.errors.OutOfRangeError):
        c.coordinator.join()


def test_a_lost_server_is_an_error_and_the_others_stay_readable(cluster: Any) -> None:
    c = cluster(workers=1, ps=2)
    with c.strategy.scope():
        first, second = td.Variable(1.0), td.Variable(2.0)

    def both() -> float:
        return float(first.value()) + float(second.value())

    assert c.coordinator.schedule(both).get(timeout=30) == 3.0
    c.kill("ps", 0)
    before = time.monotonic()
    c.coordinator.schedule(both)
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):
        c.coordinator.join(timeout=30)
    assert time.monotonic() - before < 20
    c.coordinator.join()
    with pytest.raises(UnavailableError):
        first.value()
    assert float(second.value()) == 2.0


def test_a_server_that_died_before_a_worker_used_it_is_an_error_at_once(cluster: Any) -> None:
    """The coordinator had reached it, so that the worker need not wait for it to start."""
    c = cluster(workers=1, ps=2)
    with c.strategy.scope():
        first, second = td.Variable(0.0), td.Variable(0.0)

    def use(variable: Any) -> None:
        variable.assign_add(1.0)

    c.coordinator.schedule(use, args=(second,))
    c.coordinator.join(timeout=30)
    c.kill("ps", 0)
    c.coordinator.schedule(use, args=(first,))
    with pytest.raises(UnavailableError, match="cannot be reached by this worker"):
        c.coordinator.join(timeout=20)
    c.coordinator.schedule(use, args=(second,))
    c.coordinator.join(timeout=20)
    assert float(second) == 2.0


def test_workers_and_servers_end_when_the_coordinator_is_killed(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=1, env={"TFSTYLE_PS_PATIENCE_SECONDS": "1.5"}, coordinator=False)
    script = tmp_path / "chief.py"
    script.write_text(
        "import json, sys, time\n"
        "import tfstyle_dist as td\n"
        "spec = td.cluster_resolver.ClusterSpec(json.loads(sys.argv[1]))\n"
        "strategy = td.ParameterServerStrategy(td.cluster_resolver.SimpleClusterResolver(spec, '', 'chief', 0))\n"
        "coordinator = td.coordinator.ClusterCoordinator(strategy)\n"
        "def forever():\n"
        "    import time\n"
        "    while True: time.sleep(0.1)\n"
        "coordinator.schedule(lambda: 1, worker=0).get()\n"
        "coordinator.schedule(forever, worker=1)\n"
        "time.sleep(0.5)\n"
        "print('working', flush=True)\n"
        "time.sleep(60)\n"
    )
    import json

    chief = subprocess.Popen(
        [sys.executable, str(script), json.dumps(c.spec)], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert chief.stdout is not None
        assert chief.stdout.readline() == "working\n"
    finally:
        chief.kill()
        chief.communicate()
    for job, index in [("ps", 0), ("worker", 0), ("worker", 1)]:
        assert c.wait(job, index) == 1
    assert "UnavailableError" in c.output()


def test_a_worker_that_starts_before_the_server_waits_for_it(cluster: Any) -> None:
    c = cluster(workers=1, ps=1, start=False, coordinator=False)
    c.start("worker", 0)
    late = threading.Timer(1.0, c.start, ("ps", 0))
    late.start()
    c.make_coordinator()
    with c.strategy.scope():
        one = td.Variable(1.0)
    assert c.coordinator.schedule(lambda: float(one.value())).get(timeout=30) == 1.0
    late.join()


def test_two_tasks_with_one_index(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    assert c.coordinator.schedule(lambda: 1).get(timeout=30) == 1
    with pytest.raises(UnavailableError, match="another task with the same job name and index"):
        td.Server(c.spec, "worker", 0)
    assert c.coordinator.schedule(lambda: 2).get(timeout=30) == 2


def test_functions_that_misbehave(cluster: Any, tmp_path: Path) -> None:
    c, both = cluster(workers=1, ps=1), tmp_path / "both"

    class Boom(Exception):
        pass

    def fails() -> None:
        while not both.exists():
            time.sleep(0.01)
        raise Boom("on purpose")

    def returns_a_lock() -> Any:
        return threading.Lock()

    bad = c.coordinator.schedule(fails)
    queued = c.coordinator.schedule(time.sleep, args=(0.01,))
    both.touch()
    with pytest.raises(Boom, match="on purpose") as caught:
        c.coordinator.join(timeout=30)
    assert "in fails" in "".join(caught.value.__notes__)
    with pytest.raises(Boom):
        bad.get()
    with contextlib.suppress(CancelledError):
        assert queued.get(timeout=30) is None
    c.coordinator.schedule(returns_a_lock)
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        c.coordinator.join(timeout=30)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        c.coordinator.schedule(lambda: lock)
    refuses = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="cannot be sent to another process: Serialization of parametrized modules"):
        c.coordinator.schedule(lambda: refuses)
    with c.strategy.scope():
        wide = td.Variable([1.0, 2.0])
    wrong = c.coordinator.schedule(lambda: wide.assign([1.0, 2.0, 3.0]))
    with pytest.raises(td.errors.InvalidArgumentError):
        wrong.get(timeout=30)
    with pytest.raises(td.errors.InvalidArgumentError):
        c.coordinator.join()
    never = c.coordinator.schedule(time.sleep, args=(600.0,))
    wait_until(lambda: c.coordinator.statistics().running == 1)
    with pytest.raises(DeadlineExceededError, match="1 scheduled functions are running"):
        c.coordinator.join(timeout=0.3)
    with pytest.raises(DeadlineExceededError):
        never.get(timeout=0.1)
    c.kill("worker", 0)  # the only way to end it


def test_variables_cannot_be_made_in_functions(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    c.coordinator.schedule(lambda: td.Variable(1.0))
    with pytest.raises(RuntimeError, match="coordinator's program"):
        c.coordinator.join(timeout=30)
