"""What passes on the CPU passes on devices: cases in processes of their own, where the pretend accelerator is loaded.

torch takes one backend of this kind for the rest of a process, and other tests are to see the machine as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import on_devices
import pytest
import torch

from tfstyle_dist.testing.runner import run_script

HERE = Path(__file__).parent
ON_DEVICES = HERE.parent / "gpu"  # what runs on real ones too
PRETEND = {"TFSTYLE_DEVICE_KIND": "pretend"}
LIMIT = 600  # seconds, on a machine that does much else
pytestmark = [
    pytest.mark.timeout(LIMIT),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend accelerator is compiled with g++"),
]


def run_pytest(arguments: list[str], environment: dict[str, str]) -> None:
    """A session of its own, which must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    there, limit = {**os.environ, **environment}, LIMIT - 20
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=there, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "cases",
    [HERE / "cases_device.py", ON_DEVICES / "cases_replicas.py", ON_DEVICES / "cases_steps.py"],
    ids=lambda path: path.stem,
)
def test_cases(cases: Path) -> None:
    run_pytest(["-o", "python_files=cases_*.py", str(cases)], PRETEND)


SUITES = ["variables", "gradients", "strategies"]
LAYOUTS = {"two devices": "pretend:0,pretend:1", "one device": "pretend:0#0,pretend:0#1"}


@pytest.mark.parametrize("layout", ["two devices", pytest.param("one device", marks=pytest.mark.slow)])
def test_suites(layout: str) -> None:
    """The suites' own tests, with their replicas on devices (``tests/on_devices.py``)."""
    run_pytest(
        ["-m", "not distributed and not gpu and not xla", *(f"tests/{name}" for name in SUITES)],
        {on_devices.VARIABLE: LAYOUTS[layout]},
    )


# What a run of all tests does of the other suites; docs/gpus.md says when all of each was run.
MORE = {
    "input": ["test_layouts.py", "test_sources.py", "test_uneven_training.py"],
    "checkpoint": ["test_checkpoint_contents.py"],
    "train": ["test_optimizers.py"],
    "parity": ["test_parity.py", "test_central_parity.py"],
}
PARITY = "not test_central_parity and not test_parity or adam and fp64 and (mlp or cnn or gpt2) and not sum"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_suites(layout: str) -> None:
    """Batches of every layout, checkpoints, optimizers, and models that train as on one device."""
    files = [f"tests/{folder}/{file}" for folder, names in MORE.items() for file in names]
    run_pytest(["-m", "not distributed and not slow", "-k", PARITY, *files], {on_devices.VARIABLE: LAYOUTS[layout]})


@pytest.mark.slow
def test_random_programs() -> None:
    """Programs that nobody has written, on replicas."""
    few = {"TFSTYLE_RANDOM_PROGRAMS": "20", on_devices.VARIABLE: LAYOUTS["two devices"]}
    run_pytest(
        ["-k", "test_programs and not central and not ranks", "tests/random_programs/test_random_programs.py"], few
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "names"), [("two devices", ("parity", "loops", "metrics")), ("one device", ("parity",))]
)
def test_keras(layout: str, names: tuple[str, ...]) -> None:
    """``fit``, metrics, regularizers, loops of one's own."""
    files = [f"tests/integrations/test_keras_{name}.py" for name in names]
    run_pytest(
        ["-m", "not distributed", "-k", "mirrored_2] or test_keras_loops", *files],
        {on_devices.VARIABLE: LAYOUTS[layout]},
    )


@pytest.mark.slow
def test_ranks_of_the_suites() -> None:
    """Tests of two ranks with a device each, over a library that behaves like NCCL."""
    files = [
        "gradients/test_weights_by_examples.py",
        "strategies/test_everyday.py",
        "strategies/test_sync_batch_norm.py",
        "checkpoint/test_checkpoint_ranks.py",
    ]
    run_pytest(
        ["-m", "distributed", *(f"tests/{file}" for file in files)], {on_devices.VARIABLE: LAYOUTS["two devices"]}
    )


@pytest.mark.slow
def test_models_in_parts_and_keras_on_ranks() -> None:
    """Replicas of two parts each, on four devices; ``fit`` on two ranks as on one device."""
    names = "even or single_tensors or budget or mirrored_2_workers] and (digits or exact)"
    files = ["integrations/test_keras_parity.py"]
    if torch.__version__ >= (2, 10):  # before, collectives of DTensor know no backend written in Python
        files.append("model_parallel/test_partition.py")
    run_pytest(
        ["-m", "distributed", "-k", names, *(f"tests/{file}" for file in files)],
        {on_devices.VARIABLE: LAYOUTS["two devices"]},
    )


def ranks(*arguments: str) -> list[dict[str, Any]]:
    result = run_script([str(ON_DEVICES / "rank_program.py"), *arguments], nproc=2, timeout=250, env=PRETEND)
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert result.returncode == 0, result.stderr
    assert said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_ranks_stay_equal(implementation: str) -> None:
    said = ranks("train", implementation)
    for kind in ("plain", "checkpoint", "reentrant"):
        first, second = sorted((s for s in said if s.get("kind") == kind), key=lambda s: s["rank"])
        assert first["weights"] == second["weights"]
        assert (first["device"], second["device"]) == ("pretend:0", "pretend:1")
    for facts in (s for s in said if "current" in s):
        assert facts["current"] == f"pretend:{facts['rank']}"
        assert facts["library"] is (implementation == "AUTO")


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_values_of_the_cpu_and_of_devices_are_reduced(implementation: str) -> None:
    said = ranks("values", implementation)
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


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_loops_of_users_train_as_one_device(implementation: str) -> None:
    """Shares that differ weigh by their examples, SyncBatchNorm sees all of them, a checkpoint goes on bit for bit."""
    said = ranks("everyday", implementation)
    for name, rows in (("SyncBatchNorm", 11), ("an empty share", 9)):
        first, second = sorted((s for s in said if s["name"] == name), key=lambda s: s["rank"])
        assert first["weights"] == second["weights"]
        for one in (first, second):
            assert one["off"] < 1e-10
            assert one["restored"]
            assert one["seen"] == [2.0 * rows] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_an_absent_rank_is_named_before_the_watchdog_ends_the_process(how: str) -> None:
    (said,) = ranks("lost", how)
    assert said["error"] in ("PeerLostError", "DeadlineExceededError")
    assert said["says"]
    assert said["waits"], "the library had something under way"
    assert said["ended"], "closing the strategy ends it: its watchdog would end the process"


def test_a_library_of_one_rank() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = run_script([str(ON_DEVICES / "rank_program.py"), "library", "-"], timeout=200, env={**PRETEND, **alone})
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [s["value"] for s in said] == [[0.0, 1.0, 2.0, 3.0]] * 8
    assert all(s["kept"] for s in said)
