"""Random programs (``tests/random_programs``) on two workers, of which one dies: one worker's values, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest

PROGRAMS = int(os.environ.get("TFSTYLE_RANDOM_PROGRAMS", "0")) // 10 or 12
FIRST = int(os.environ.get("TFSTYLE_RANDOM_PROGRAMS_FROM", "0"))
SCRIPT = "../random_programs/elastic_programs.py"


@pytest.mark.timeout(60 + 20 * PROGRAMS)
def test_random_programs_of_which_a_worker_dies(run_job: Any) -> None:
    compared = 0
    for seed in range(FIRST, FIRST + PROGRAMS):
        (alone,) = run_job(1, seed, script=SCRIPT)
        if alone["code"]:
            continue  # tests/random_programs says whether torch refuses it
        victim = seed % 2
        for killed in ([], [victim]):
            job = run_job(2, seed, *killed, script=SCRIPT)
            for number, worker in enumerate(job):
                assert worker["code"] == (-9 if number in killed else 0), (seed, killed, worker["output"])
                for replica, values in (worker["result"] or {}).items():
                    assert values == alone["result"][replica], (seed, killed, number, replica)
                    compared += 1
    assert compared >= 2 * PROGRAMS


@pytest.mark.parametrize("zeroed", ["1", "0"])
def test_replicas_that_use_different_parameters(run_job: Any, zeroed: str) -> None:
    for worker in run_job(2, zeroed, script="uneven_use.py"):
        assert worker["code"] == 0, worker["output"]
        expected = [[0.5, 1.0], [5.5, 6.0], [10.5, 11.0]] if zeroed == "1" else [[0.5, 1.0], [6.0, 7.0], [16.5, 18.0]]
        assert worker["result"] == expected


def test_a_worker_that_came_back_with_another_rate_ends_nothing_but_itself(run_job: Any) -> None:
    alone = run_job(2, script="counting_rate.py")
    assert [worker["code"] for worker in alone] == [0, 0], alone[0]["output"]
    stays, came_back = run_job(2, script="counting_rate.py", restarts={1: 1}, REJOIN="6", WORKERS="2", limit=40)
    assert stays["code"] == 0, stays["output"]
    assert stays["result"] == alone[0]["result"]
    assert came_back["code"] == 1
    assert "different settings" in came_back["output"]
