"""Two ranks with a device each, or one for both: what they say is compared. Run like ``cases_replicas.py``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from device_kind import KIND
from on_replicas import ACCELERATOR

from tfstyle_dist.testing.runner import run_script

PROGRAM = Path(__file__).parent / "rank_program.py"
LIMIT = 250.0  # seconds, on a machine that does much else
DEVICES = ACCELERATOR.device_count()
WHERE = [f"{KIND}:{rank % DEVICES}" for rank in (0, 1)]
pytestmark = pytest.mark.timeout(LIMIT + 20)
over_both = pytest.mark.parametrize("implementation", ["AUTO", "RING"])


def said_by(*arguments: str, count: int = 2, **environment: str) -> list[dict[str, Any]]:
    """What the ranks said, each a line of JSON."""
    result = run_script([PROGRAM, *arguments], count, LIMIT, {"TFSTYLE_DEVICE_KIND": KIND, **environment})
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert result.returncode == 0, result.stderr
    assert said
    return said


@cache
def said_of_all(implementation: str) -> list[dict[str, Any]]:
    """What they say of three parts: they are started once for these."""
    return said_by("train,values,everyday", implementation)


def said_of(part: str, implementation: str) -> list[dict[str, Any]]:
    return [facts for facts in said_of_all(implementation) if facts["part"] == part]


@over_both
def test_ranks_stay_equal(implementation: str) -> None:
    said = said_of("train", implementation)
    for kind in ("plain", "checkpoint", "reentrant"):
        first, second = sorted((s for s in said if s.get("kind") == kind), key=lambda s: s["rank"])
        assert first["weights"] == second["weights"]
        assert [first["device"], second["device"]] == WHERE
    for facts in (s for s in said if "current" in s):
        assert facts["current"] == WHERE[facts["rank"]]
        assert facts["library"] is (implementation == "AUTO")


@over_both
def test_values_of_the_cpu_and_of_devices_are_reduced(implementation: str) -> None:
    said = said_of("values", implementation)
    expected = {
        "reduce": [3.0] * 4,
        "reduce of a CPU value": [6.0],
        "reduce rows": [6.0] * 2,
        "mean of rows": [1.5] * 2,
        "mean of halves": [1.5] * 2,
        "all_reduce": [3.0] * 4,
        "all_reduce of a CPU value": [2.0] * 2,
        "all_reduce of both": [3.0] * 4 + [2.0] * 2 + [3.0] * 4,
        "all_gather": [1.0] * 4 + [2.0] * 4,
        "all_gather of uneven CPU values": [1.0] * 3,
        "gather": [1.0] * 4 + [2.0] * 4,
        "places of several values": [1.0] * 3,
        "calls of the library for what the host must know": [0.0],
        "a tree over 4 elements": [3.0] * 2,
        "a tree over 2000000 elements": [3.0] * 2,
        "reduce of values in different places": ["refused"] if implementation == "AUTO" else [3.0] * 2,
        "gather of values in different places": ["refused"] if implementation == "AUTO" else [1.0, 1.0, 2.0, 2.0],
    }
    for rank in (0, 1):
        assert {s["name"]: s["value"] for s in said if s["rank"] == rank} == expected


@over_both
def test_loops_of_users_train_as_one_device(implementation: str) -> None:
    """Shares that differ weigh by their examples, SyncBatchNorm sees all of them, a checkpoint goes on bit for bit."""
    said = said_of("everyday", implementation)
    for name, rows in (("SyncBatchNorm", 11), ("an empty share", 9)):
        first, second = sorted((s for s in said if s["name"] == name), key=lambda s: s["rank"])
        assert first["weights"] == second["weights"]
        for one in (first, second):
            assert one["off"] < 1e-10
            assert one["restored"]
            assert one["seen"] == [2.0 * rows] * 2


def test_ranks_that_share_a_device_meet_on_the_cpu() -> None:
    result = run_script([PROGRAM, "together", "-"], 2, LIMIT, {"TFSTYLE_DEVICE_KIND": KIND})
    assert result.returncode == 0, result.stderr
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for one in said:
        assert one["gradient"] == [[1.5, 1.5]]
        assert one["where"] == f"{KIND}:0"
        assert one["calls"] == 0
        if KIND == "cuda":
            assert "workers 0 and 1 share a CUDA device, which NCCL refuses" in one["refused"]
    assert len(said) == 2
    assert f"Workers 0 and 1 share a {KIND.upper()} device: gradients travel over the CPU" in result.stderr


@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_an_absent_rank_is_named_before_the_watchdog_ends_the_process(how: str) -> None:
    (said,) = said_by("lost", how)
    assert said["error"] in ("PeerLostError", "DeadlineExceededError")
    assert said["says"]
    if KIND == "pretend":  # its library tells what it has under way
        assert said["waits"], "the library had something under way"
        assert said["ended"], "closing the strategy ends it: its watchdog would end the process"


def test_a_library_of_one_rank() -> None:
    """Every collective that it carries."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    said = said_by("library", "-", count=1, **alone)
    assert [s["value"] for s in said] == [[0.0, 1.0, 2.0, 3.0]] * 6
    assert all(s["kept"] for s in said)
