"""Workers are killed with SIGKILL in the middle of steps; the end is that of the undisturbed run, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

STEPS = 8
_undisturbed: dict[str, dict[str, Any]] = {}
EXACT = ("weights", "losses", "buffers", "seen")


@pytest.fixture
def undisturbed(run_job: Any) -> Any:
    """The result of a model trained by one worker that holds all replicas."""

    def result(kind: str, **environment: str) -> dict[str, Any]:
        what = " ".join([kind, *environment.values()])
        if what not in _undisturbed:
            (worker,) = run_job(1, kind, STEPS, **environment)
            assert worker["code"] == 0, worker["output"]
            _undisturbed[what] = worker["result"]
        return _undisturbed[what]

    return result


def held_before_the_last_step(job: list[dict[str, Any]]) -> list[int]:
    """All replicas that the workers held in the step before the last one: nobody had left."""
    return sorted(replica for worker in job for replica in worker["result"]["held"][-2])


def assert_same(job: list[dict[str, Any]], expected: dict[str, Any], killed: set[int]) -> None:
    for index, worker in enumerate(job):
        if index in killed:
            assert worker["code"] == -9, worker["output"]
            continue
        assert worker["code"] == 0, worker["output"]
        found = worker["result"]
        for name in EXACT:
            wanted = expected[name][found["first"] :] if name == "losses" else expected[name]
            assert found[name] == wanted, (index, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "workers"), [("cnn", 2), ("cnn", 3), ("cnn", 4), ("wide", 2)])
def test_it_does_not_matter_who_holds_which_replica(run_job: Any, undisturbed: Any, kind: str, workers: int) -> None:
    job = run_job(workers, kind, STEPS)
    assert_same(job, undisturbed(kind), set())
    assert held_before_the_last_step(job) == [0, 1, 2, 3]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer", "joint"])
def test_the_weights_after_kills_are_those_of_the_undisturbed_run(run_job: Any, undisturbed: Any, kind: str) -> None:
    job = run_job(4, kind, STEPS, "2:2:backward", "0:4:step", "3:6:forward")
    assert_same(job, undisturbed(kind), {0, 2, 3})
    assert job[1]["result"]["held"][-1] == [0, 1, 2, 3]
    assert job[1]["result"]["retried"] >= 1


@pytest.mark.timeout(600)
def test_all_workers_compute_with_as_many_threads(run_job: Any, undisturbed: Any) -> None:
    """One that comes back too: with another number of threads a norm of gradients has other last bits."""
    job = run_job(2, "cnn", STEPS, "1:3:backward", restarts={1: 1}, REJOIN="5", WORKERS="2", THREADS="1,2")
    assert_same(job, undisturbed("cnn"), set())
    assert [worker["result"]["threads"] for worker in job] == [1, 1]
    assert job[1]["result"]["joined"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["start", "forward", "backward", "step", "end"])
def test_worker_0_may_die_anywhere_in_a_step(run_job: Any, undisturbed: Any, place: str) -> None:
    assert_same(run_job(2, "mlp", STEPS, f"0:3:{place}"), undisturbed("mlp"), {0})


@pytest.mark.timeout(600)
def test_two_workers_die_in_one_step(run_job: Any, undisturbed: Any) -> None:
    assert_same(run_job(4, "cnn", STEPS, "0:3:backward", "2:3:step"), undisturbed("cnn"), {0, 2})


@pytest.mark.timeout(600)
def test_a_worker_that_stands_still_is_given_up_and_says_so(run_job: Any, undisturbed: Any) -> None:
    job = run_job(3, "mlp", STEPS, "1:3:stop-15", SUSPECT="6")
    for index in (0, 2):
        assert job[index]["code"] == 0, job[index]["output"]
        assert job[index]["result"]["weights"] == undisturbed("mlp")["weights"]
    assert job[1]["code"] == 1
    assert "was given up by worker [0, 2]" in job[1]["output"]


@pytest.mark.timeout(600)
def test_a_stopped_process_is_given_up_earlier_where_that_was_asked_for(run_job: Any, undisturbed: Any) -> None:
    job = run_job(3, "mlp", STEPS, "1:3:stop-15", SUSPECT="60", STOPPED="0.5")
    for index in (0, 2):
        assert job[index]["code"] == 0, job[index]["output"]
        assert job[index]["result"]["weights"] == undisturbed("mlp")["weights"]
    # Who sees it first tells the other, which may then not have seen it by itself.
    assert "worker 1 was stopped by a signal" in job[0]["output"] + job[2]["output"]
    assert job[1]["code"] == 1
    assert "was given up by worker [0, 2]" in job[1]["output"]


@pytest.mark.timeout(600)
def test_a_short_stop_is_waited_for(run_job: Any, undisturbed: Any) -> None:
    job = run_job(3, "mlp", STEPS, "1:3:stop-2")
    assert_same(job, undisturbed("mlp"), set())
    assert [worker["result"]["retried"] for worker in job] == [0, 0, 0]


# ---- coming back --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer", "joint"])
def test_the_weights_after_kills_and_rejoins_are_those_of_the_undisturbed_run(
    run_job: Any, undisturbed: Any, kind: str
) -> None:
    faults = ["2:2:backward", "0:4:step", "3:5:forward"]
    job = run_job(4, kind, STEPS, *faults, restarts={0: 1, 2: 1, 3: 1}, REJOIN="3")
    assert_same(job, undisturbed(kind), set())
    assert [worker["result"]["joined"] for worker in job] == [True, False, True, True], job
    assert held_before_the_last_step(job) == [0, 1, 2, 3]
    assert job[2]["result"]["first"] in range(2, 5)


@pytest.mark.timeout(600)
def test_a_program_that_asks_before_each_step_whether_to_stop(run_job: Any, undisturbed: Any) -> None:
    """The others have asked already when a worker comes in."""
    job = run_job(3, "mlp", STEPS, "1:2:forward", restarts={1: 1}, REJOIN="3", WORKERS="3", ASK="1")
    assert_same(job, undisturbed("mlp"), set())
    assert job[1]["result"]["joined"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["start", "step"])
def test_a_worker_that_came_back_may_die_in_its_first_step(run_job: Any, undisturbed: Any, place: str) -> None:
    again = [f"1:{step}:{place}:1" for step in range(2, STEPS)]
    job = run_job(3, "mlp", STEPS, "1:2:forward", *again, restarts={1: 2}, REJOIN="3", WORKERS="3")
    assert_same(job, undisturbed("mlp"), set())
    assert job[1]["result"]["life"] == 2
    assert job[1]["result"]["joined"]


# ---- TF-style optimizers ------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("mlp", "tf-momentum"), ("transformer", "tf-adam"), ("cnn", "tf-wrapped"), ("joint-tf", "")],
)
def test_tf_style_optimizers_after_kills_and_rejoins(run_job: Any, undisturbed: Any, kind: str, optimizer: str) -> None:
    """The slots too; CHECK compares those of all workers in every step."""
    faults = ["2:2:backward", "0:4:step", "3:5:forward"]
    job = run_job(4, kind, STEPS, *faults, restarts={0: 1, 2: 1, 3: 1}, REJOIN="3", OPTIMIZER=optimizer, CHECK="1")
    assert_same(job, undisturbed(kind, OPTIMIZER=optimizer), set())
    assert [worker["result"]["joined"] for worker in job] == [True, False, True, True], job
    assert held_before_the_last_step(job) == [0, 1, 2, 3]


@pytest.mark.timeout(600)
def test_a_tf_style_optimizer_when_worker_0_dies_and_nobody_comes_back(run_job: Any, undisturbed: Any) -> None:
    job = run_job(3, "mlp", STEPS, "0:3:step", "1:5:backward", OPTIMIZER="tf-adam")
    assert_same(job, undisturbed("mlp", OPTIMIZER="tf-adam"), {0, 1})
