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

import on_devices
import pytest
import torch

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
    [
        HERE / "cases_device.py",
        ON_DEVICES / "cases_replicas.py",
        ON_DEVICES / "cases_steps.py",
        pytest.param(ON_DEVICES / "cases_ranks.py", marks=pytest.mark.slow),
    ],
    ids=lambda path: path.stem,
)
def test_cases(cases: Path) -> None:
    run_pytest(["-o", "python_files=cases_*.py", str(cases)], PRETEND)


SAME = ("strategies/test_central_own_settings.py", "variables/test_freed_with_the_strategy.py")
"""What no device shows anything else in: settings of optimizers on the CPU, and objects of Python."""
SAME_ON_ONE = (*SAME, "strategies/test_central_own_writes.py", "strategies/test_compiled_steps.py")
"""The same of one device: under central storage of several replicas the parameters are on the CPU and each replica has
an inside of its own, whichever devices compute, and what is compiled for several replicas of one device is so on the
CPU."""
LAYOUTS = {"two devices": "pretend:0,pretend:1", "one device": "pretend:0#0,pretend:0#1"}
SUITES = {
    "two devices": (["variables", "gradients", "strategies"], SAME),
    "one device": (["gradients", "strategies"], SAME_ON_ONE),
}


@pytest.mark.parametrize("layout", ["two devices", pytest.param("one device", marks=pytest.mark.slow)])
def test_suites(layout: str) -> None:
    """The suites' own tests, with their replicas on devices (``tests/on_devices.py``)."""
    suites, same = SUITES[layout]
    chosen = [*(f"--ignore=tests/{name}" for name in same), *(f"tests/{name}" for name in suites)]
    run_pytest(["-m", "not distributed and not gpu and not xla", *chosen], {on_devices.VARIABLE: LAYOUTS[layout]})


TWO_DEVICES = {on_devices.VARIABLE: LAYOUTS["two devices"]}
# What a run of all tests does of the other suites; docs/gpus.md says when all of each was run.
MORE = {
    "input": [""],
    "checkpoint": ["test_checkpoint_contents.py"],
    "train": ["test_optimizers.py"],
    "parity": ["test_parity.py", "test_central_parity.py"],
}
PARITY = "not test_central_parity and not test_parity or adam and fp64 and (mlp or cnn or gpt2) and not sum"


@pytest.mark.slow
def test_more_suites() -> None:
    """Batches of every layout, checkpoints, optimizers, and models that train as on one device."""
    files = [f"tests/{folder}/{file}" for folder, names in MORE.items() for file in names]
    run_pytest(["-m", "not distributed and not slow", "-k", PARITY, *files], TWO_DEVICES)


@pytest.mark.slow
def test_random_programs() -> None:
    """Programs that nobody has written, on replicas."""
    few = {"TFSTYLE_RANDOM_PROGRAMS": "20", **TWO_DEVICES}
    run_pytest(
        ["-k", "test_programs and not central and not ranks", "tests/random_programs/test_random_programs.py"], few
    )


@pytest.mark.slow
def test_keras() -> None:
    """``fit``, metrics, regularizers, loops and steps of one's own, without the one of 800 steps."""
    files = [f"tests/integrations/test_keras_{name}.py" for name in ("parity", "loops", "metrics", "train_steps")]
    chosen = "(mirrored_2] or test_keras_loops) and not whose_result_is_its_state"
    run_pytest(["-m", "not distributed", "-k", chosen, *files], TWO_DEVICES)


@pytest.mark.slow
def test_ranks_of_the_suites() -> None:
    """Tests of two ranks with a device each, over a library that behaves like NCCL."""
    files = [
        "gradients/test_weights_by_examples.py",
        "strategies/test_everyday.py",
        "strategies/test_sync_batch_norm.py",
        "checkpoint/test_checkpoint_ranks.py",
    ]
    run_pytest(["-m", "distributed", *(f"tests/{file}" for file in files)], TWO_DEVICES)


@pytest.mark.slow
def test_models_in_parts_and_keras_on_ranks() -> None:
    """Replicas of two parts each, on four devices; ``fit`` on two ranks as on one device."""
    names = "even or single_tensors or budget or mirrored_2_workers] and (digits or exact)"
    files = ["integrations/test_keras_parity.py"]
    if torch.__version__ >= (2, 10):  # before, collectives of DTensor know no backend written in Python
        files.append("model_parallel/test_partition.py")
    run_pytest(["-m", "distributed", "-k", names, *(f"tests/{file}" for file in files)], TWO_DEVICES)


@pytest.mark.slow
@pytest.mark.parametrize("default", ["cpu", "pretend:0"])
def test_keras_computes_where_the_strategy_does(default: str) -> None:
    """Whichever device Keras would take, as a machine with a GPU does for a strategy on the CPU."""
    environment = {**os.environ, "KERAS_TORCH_DEVICE": default}
    command = [sys.executable, str(HERE / "keras_places.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT - 20, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) == 16
    assert all(facts["places"] == [facts["wanted"]] for facts in said), said
    expected = said[0]["losses"]  # the first values are drawn on the CPU, whatever the device
    for facts in said:
        if facts["losses"] is not None:
            assert facts["losses"] == pytest.approx(expected, rel=1e-4), said
