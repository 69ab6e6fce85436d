"""Every example runs in the forms that it names, and prints what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ONE = pytest.param(1, [], id="one replica")
THREADS = pytest.param(1, ["--replicas", "2"], id="two replicas in one process")
TORCHRUN = pytest.param(2, [], id="torchrun")


def run(name: str, nproc: int = 1, options: list[str] | None = None, timeout: float = 200) -> str:
    """Runs an example on the CPU and returns what it printed."""
    argv = [EXAMPLES / name, *(options or [])]
    result = run_script(argv, nproc=nproc, timeout=timeout, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_this_file_knows_every_example() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "quickstart.py",
        "variable_aggregation.py",
        "aggregation_methods.py",
        "central_storage.py",
        "checkpoints.py",
        "elastic.py",
        "model_parallel.py",
        "parameter_server.py",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        ONE,
        THREADS,
        TORCHRUN,
        pytest.param(1, ["--replicas", "3"], id="three replicas in one process"),
        pytest.param(2, ["--replicas", "2"], id="torchrun, two replicas each"),
        pytest.param(1, ["--strategy", "one_device"], id="one device"),
    ],
)
def test_quickstart_trains_and_agrees_with_one_device(nproc: int, options: list[str]) -> None:
    output = run("quickstart.py", nproc, options)
    scores = re.findall(r"^epoch \d+: .* \((\d+) of (\d+)\)$", output, re.MULTILINE)
    assert len(scores) == 15, output  # once each: the chief alone prints
    assert {seen for _, seen in scores} == {"357"}
    assert int(scores[-1][0]) / 357 >= 0.97
    (parity,) = re.findall(r"max\|dw\|/max\|w\| = (\S+)", output)
    assert float(parity) <= 1e-5


def test_quickstart_says_which_batch_sizes_it_takes() -> None:
    result = run_script([EXAMPLES / "quickstart.py", "--batch-size", "50"], env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 1
    assert "--batch-size must divide 1440" in result.stderr


@pytest.mark.slow
def test_variable_aggregation_on_one_replica() -> None:
    output = run("variable_aggregation.py")
    assert "value before update: 1, after: 2" in output
    assert "ValueError" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "options"), [THREADS, TORCHRUN])
def test_variable_aggregation_on_two_replicas(nproc: int, options: list[str]) -> None:
    output = run("variable_aggregation.py", nproc, options)
    assert "ValueError: 1.0 cannot be reduced" in output
    assert output.count("value before update: 1, after: 3") == 1
    rows = {name: values.split() for name, values in re.findall(r"^  ([A-Z_]+) +([\d. ]+)$", output, re.M)}
    assert rows == {
        "NONE": ["11", "12"],
        "SUM": ["13", "13"],
        "MEAN": ["11.5", "11.5"],
        "ONLY_FIRST_REPLICA": ["11", "11"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        pytest.param(1, [], id="four replicas in one process"),
        THREADS,
        pytest.param(2, ["--replicas", "1"], id="torchrun"),
    ],
)
def test_aggregation_methods_reduce_the_loss_and_agree(nproc: int, options: list[str]) -> None:
    output = run("aggregation_methods.py", nproc, options)
    losses = re.findall(r"loss (\S+) -> (\S+)", output)
    assert len(losses) == 3
    assert all(float(last) < 0.8 * float(first) for first, last in losses)
    spreads = re.findall(r"largest difference of a loss (\S+)", output)
    assert len(spreads) == 3
    assert all(float(spread) <= 1e-6 for spread in spreads)


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "options"), [ONE, THREADS, TORCHRUN])
def test_central_storage_trains_with_one_copy(nproc: int, options: list[str]) -> None:
    output = run("central_storage.py", nproc, options)
    assert len(re.findall(r"^epoch \d+: loss", output, re.MULTILINE)) == 10, output
    ((right, seen),) = re.findall(r"^test accuracy .* \((\d+) of (\d+)\)$", output, re.MULTILINE)
    assert seen == "357"
    assert int(right) / 357 >= 0.95
    assert "parameters on cpu:0: 0.3 MiB of weights and 0.6 MiB of optimizer state, once" in output
    assert output.count("memory of this process") == nproc  # two ranks may share a line


@pytest.mark.parametrize(("nproc", "options"), [THREADS, TORCHRUN])
def test_checkpoints_go_on_with_another_number_of_replicas(nproc: int, options: list[str]) -> None:
    output = run("checkpoints.py", nproc, options)
    assert f"{3 if nproc == 1 else 2} replica(s) go on at step 7" in output
    (difference,) = re.findall(r"largest difference to a job that never stopped: (\S+)", output)
    assert float(difference) <= 1e-5
    assert output.count("plain PyTorch reads the same weights: True") == 1


@pytest.mark.slow
def test_elastic_alone_and_again(tmp_path: Path) -> None:
    """tests/faults/test_checkpoint_elastic.py runs it with hosts that go and come."""
    output = run("elastic.py", options=["--directory", str(tmp_path), "--epochs", "1"])
    assert "1 worker(s) begin at step 0, from nothing" in output
    assert "samples seen 1 to 1 times in 1 epochs" in output
    output = run("elastic.py", options=["--directory", str(tmp_path), "--epochs", "2"])
    assert "1 worker(s) begin at step 10, from " in output
    assert "samples seen 2 to 2 times in 2 epochs" in output


@pytest.mark.slow
def test_parameter_server_trains_with_workers_and_a_server_of_its_own() -> None:
    output = run("parameter_server.py", options=["--steps", "400"])
    assert re.search(r"test accuracy 0\.9\d+ after 400 steps", output)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["2", "4"])
def test_model_parallel_agrees_with_the_model_in_one_piece(parts: str) -> None:
    output = run("model_parallel.py", 4, ["--parts", parts])
    ((held, elements),) = re.findall(r"each holds (\d+) of (\d+) elements", output)  # the chief alone prints
    assert int(held) < int(elements) * (0.55 if parts == "2" else 0.35)
    (difference,) = re.findall(r"difference (\S+)", output)
    assert float(difference) <= 1e-4
