"""Workers are killed with SIGKILL in the middle of steps; the end is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

STEPS = 8
_undisturbed: dict[str, dict[str, Any]] = {}
EXACT = ("weights", "losses", "buffers", "seen")


@pytest.fixture
def undisturbed(run_job: Any) -> Any:
    """The result of a model trained by one worker that holds all replicas."""

    def result(kind: str) -> dict[str, Any]:
        if kind not in _undisturbed:
            (worker,) = run_job(1, kind, STEPS)
            assert worker["code"] == 0, worker["output"]
            _undisturbed[kind] = worker["result"]
        return _undisturbed[kind]

    return result


def assert_same(job: list[dict[str, Any]], expected: dict[str, Any], killed: set[int]) -> None:
    for index, worker in enumerate(job):
        if index in killed:
            assert worker["code"] == -9, worker["output"]
            continue
        assert worker["code"] == 0, worker["output"]
        for name in EXACT:
            assert worker["result"][name] == expected[name], (index, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_it_does_not_matter_who_holds_which_replica(run_job: Any, undisturbed: Any, workers: int) -> None:
    job = run_job(workers, "cnn", STEPS)
    assert_same(job, undisturbed("cnn"), set())
    assert sorted(r for worker in job for r in worker["result"]["held"]) == [0, 1, 2, 3]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer", "joint"])
def test_the_weights_after_kills_are_those_of_the_undisturbed_run(run_job: Any, undisturbed: Any, kind: str) -> None:
    job = run_job(4, kind, STEPS, "2:2:backward", "0:4:step", "3:6:forward")
    assert_same(job, undisturbed(kind), {0, 2, 3})
    assert job[1]["result"]["held"] == [0, 1, 2, 3]
    assert job[1]["result"]["retried"] >= 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["start", "forward", "backward", "step", "end"])
def test_worker_0_may_die_anywhere_in_a_step(run_job: Any, undisturbed: Any, place: str) -> None:
    assert_same(run_job(2, "mlp", STEPS, f"0:3:{place}"), undisturbed("mlp"), {0})


@pytest.mark.timeout(600)
def test_two_workers_die_in_one_step(run_job: Any, undisturbed: Any) -> None:
    assert_same(run_job(4, "cnn", STEPS, "0:3:backward", "2:3:step"), undisturbed("cnn"), {0, 2})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_places(run_job: Any, undisturbed: Any, seed: int) -> None:
    chance = random.Random(seed)
    kind, victims = chance.choice(["mlp", "cnn", "transformer"]), chance.sample(range(4), 3)
    faults = [
        f"{v}:{chance.randrange(STEPS)}:{chance.choice(['start', 'forward', 'backward', 'step', 'end'])}"
        for v in victims
    ]
    assert_same(run_job(4, kind, STEPS, *faults), undisturbed(kind), set(victims))


@pytest.mark.timeout(600)
def test_a_worker_that_stands_still_is_given_up_and_says_so(run_job: Any, undisturbed: Any) -> None:
    job = run_job(3, "mlp", STEPS, "1:3:stop-25", SUSPECT="6")
    for index in (0, 2):
        assert job[index]["code"] == 0, job[index]["output"]
        assert job[index]["result"]["weights"] == undisturbed("mlp")["weights"]
    assert job[1]["code"] == 1
    assert "was given up by worker [0, 2]" in job[1]["output"]
