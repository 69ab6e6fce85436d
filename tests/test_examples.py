"""Every example runs in the forms that it names, and prints what it promises.

Most forms run on the plugin's ranks, which import torch once for all. The commands of the README and of each launcher
are run as they stand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import EXAMPLES, Player, in_forms, on_ranks

import tfstyle_dist as tfd
from tfstyle_dist.testing.runner import run_script

ONE = ("one replica", 0, [])
THREADS = ("two replicas in one process", 0, ["--replicas", "2"])
RANKS = ("two ranks", 2, [])
CUSTOM_TRAINING_LOSSES = [0.2960, 0.1034]
"""Of the first two epochs of custom_training.py on one replica."""


def run(name: str, nproc: int = 1, options: list[str] | None = None, timeout: float = 200) -> str:
    """Runs an example on the CPU in processes of its own, alone or under torchrun, and returns what it printed."""
    argv = [EXAMPLES / name, *(options or [])]
    result = run_script(argv, nproc=nproc, timeout=timeout, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def run_module(module: str, arguments: list[str]) -> str:
    """Runs ``python -m module`` and returns what it printed."""
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_this_file_knows_every_example() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    elsewhere = {"accelerate_script.py", "trainer_script.py"}  # tests/integrations/test_accelerate_examples.py
    assert names == elsewhere | {
        "quickstart.py",
        "custom_training.py",
        "distributed_input.py",
        "multi_worker_loop.py",
        "variable_aggregation.py",
        "aggregation_methods.py",
        "central_storage.py",
        "checkpoints.py",
        "elastic.py",
        "elastic_training.py",
        "keras_fit.py",
        "model_parallel.py",
        "multi_worker_keras.py",
        "parameter_server.py",
        "save_and_load.py",
        "embedding_recommender.py",
        "sync_vs_async.py",
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


def check_quickstart(output: str, epochs: int) -> None:
    scores = re.findall(r"epoch \d+: .* \((\d+) of (\d+)\)$", output, re.MULTILINE)
    assert len(scores) == epochs, output  # once each: the chief alone prints
    assert {seen for _, seen in scores} == {"357"}
    assert int(scores[-1][0]) / 357 >= 0.97
    (parity,) = re.findall(r"max\|dw\|/max\|w\| = (\S+)", output)
    assert float(parity) <= 1e-5


@pytest.mark.slow
@in_forms(
    ONE,
    ("three replicas in one process", 0, ["--replicas", "3"]),
    ("two ranks of two replicas", 2, ["--replicas", "2"]),
    ("one device", 0, ["--strategy", "one_device"]),
)
def test_quickstart_trains_and_agrees_with_one_device(player: Player, options: list[str]) -> None:
    check_quickstart(player.play("quickstart.py", [*options, "--epochs", "10"]), 10)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", "torchrun", "launch"])
def test_quickstart_as_a_command(launcher: str) -> None:
    """Word for word as in the README, but for the number of epochs under the launchers."""
    if launcher == "none":
        check_quickstart(run("quickstart.py", 1, ["--replicas", "2"]), 15)
    elif launcher == "torchrun":
        check_quickstart(run("quickstart.py", 2, ["--epochs", "10"]), 10)
    else:
        script = [str(EXAMPLES / "quickstart.py"), "--strategy", "multi_worker", "--epochs", "10"]
        result = run_script(["-m", "tfstyle_dist.launch", "--workers", "2", *script], env={"CUDA_VISIBLE_DEVICES": ""})
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        check_quickstart(result.stdout, 10)


@on_ranks(0)
def test_quickstart_says_which_batch_sizes_it_takes(player: Player) -> None:
    with pytest.raises(SystemExit, match="--batch-size must divide 1440"):
        player.play("quickstart.py", ["--batch-size", "50"])


@pytest.mark.slow
@on_ranks(0)
def test_variable_aggregation_on_one_replica(player: Player) -> None:
    output = player.play("variable_aggregation.py")
    assert "value before update: 1, after: 2" in output
    assert "ValueError" not in output


@pytest.mark.slow
@in_forms(THREADS, RANKS)
def test_variable_aggregation_on_two_replicas(player: Player, options: list[str]) -> None:
    output = player.play("variable_aggregation.py", options)
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
@in_forms(("four replicas in one process", 0, []), THREADS, ("two ranks", 2, ["--replicas", "1"]))
def test_aggregation_methods_reduce_the_loss_and_agree(player: Player, options: list[str]) -> None:
    output = player.play("aggregation_methods.py", options)
    losses = re.findall(r"loss (\S+) -> (\S+)", output)
    assert len(losses) == 3
    assert all(float(last) < 0.8 * float(first) for first, last in losses)
    spreads = re.findall(r"largest difference of a loss (\S+)", output)
    assert len(spreads) == 3
    assert all(float(spread) <= 1e-6 for spread in spreads)


@pytest.mark.slow
@in_forms(ONE, THREADS, RANKS)
def test_central_storage_trains_with_one_copy(player: Player, options: list[str]) -> None:
    output = player.play("central_storage.py", options)
    assert len(re.findall(r"^epoch \d+: loss", output, re.MULTILINE)) == 10, output
    ((right, seen),) = re.findall(r"^test accuracy .* \((\d+) of (\d+)\)$", output, re.MULTILINE)
    assert seen == "357"
    assert int(right) / 357 >= 0.95
    assert "parameters on cpu:0: 0.3 MiB of weights and 0.6 MiB of optimizer state, once" in output
    assert output.count("memory of this process") == player.world_size


@in_forms(THREADS, RANKS)
def test_checkpoints_go_on_with_another_number_of_replicas(player: Player, options: list[str]) -> None:
    output = player.play("checkpoints.py", options)
    assert f"{3 if player.world_size == 1 else 2} replica(s) go on at step 7" in output
    (difference,) = re.findall(r"largest difference to a job that never stopped: (\S+)", output)
    assert float(difference) <= 1e-5
    assert output.count("plain PyTorch reads the same weights: True") == 1


@pytest.mark.slow
@in_forms(ONE, ("three replicas in one process", 0, ["--replicas", "3"]), RANKS)
def test_custom_training_gives_the_same_losses_on_any_number_of_replicas(player: Player, options: list[str]) -> None:
    output = player.play("custom_training.py", options)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+), test accuracy \S+% of 113$", output, re.M)]
    assert len(losses) == 8, output
    assert losses[-1] < 0.3 * losses[0]
    assert losses[:2] == pytest.approx(CUSTOM_TRAINING_LOSSES, abs=2e-4)
    assert output.count("restored without a strategy: accuracy 9") == 1


@pytest.mark.slow
@in_forms(("two replicas in one process", 0, []), ("two ranks", 2, ["--replicas", "1"]))
def test_distributed_input_hands_out_every_sample_once(player: Player, options: list[str]) -> None:
    output = player.play("distributed_input.py", options)
    ways = re.findall(r"^(\w+): (\d+) samples, each once: True$", output, re.M)
    assert [name for name, _ in ways] == ["DataLoader", "stream", "function", "files"], output
    assert "policy FILE (from AUTO)" in output


@pytest.mark.slow
@on_ranks(2)
def test_multi_worker_loop_goes_on_where_it_ended(player: Player, shared_tmp_path: Path) -> None:
    options = ["--directory", str(shared_tmp_path / "saved"), "--steps-per-epoch", "20"]
    output = player.play("multi_worker_loop.py", [*options, "--epochs", "1"])
    assert output.count("one of 2 workers, the chief") == output.count("one of 2 workers, not the chief") == 1
    assert "begins at epoch 0, step 0, from nothing" in output
    output = player.play("multi_worker_loop.py", [*options, "--epochs", "2"])
    assert "begins at epoch 1, step 20, from " in output
    ((loss, step),) = re.findall(r"^epoch 2: loss (\S+) after (\d+) steps$", output, re.M)
    assert step == "40"
    assert float(loss) < 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_elastic_training_kills_its_workers_and_ends_with_the_same_weights() -> None:
    arguments = ["--epochs", "1", "--pause", "0"]
    alone = run("elastic_training.py", options=arguments)
    launched = [sys.executable, "-m", "tfstyle_dist.launch", "--workers", "2", "--elastic", "--max-restarts", "20"]
    killed = [str(EXAMPLES / "elastic_training.py"), "--epochs", "1", "--pause", "1", "--first-kill", "2"]
    result = subprocess.run([*launched, *killed], capture_output=True, text=True, timeout=260)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout.count("[worker 1] this worker kills itself") == 1
    (expected,) = re.findall(r"weights ([0-9a-f]{16})$", alone, re.M)
    found = re.findall(r"weights ([0-9a-f]{16})$", result.stdout, re.M)
    assert found, result.stdout
    assert set(found) == {expected}
    assert "10 steps committed here" in alone


@pytest.mark.slow
@on_ranks(0)
def test_elastic_alone_and_again(player: Player, tmp_path: Path) -> None:
    """tests/faults/test_checkpoint_elastic.py runs it with hosts that go and come."""
    output = player.play("elastic.py", ["--directory", str(tmp_path), "--epochs", "1"])
    assert "1 worker(s) begin at step 0, from nothing" in output
    assert "samples seen 1 to 1 times in 1 epochs" in output
    output = player.play("elastic.py", ["--directory", str(tmp_path), "--epochs", "2"])
    assert "1 worker(s) begin at step 10, from " in output
    assert "samples seen 2 to 2 times in 2 epochs" in output


@pytest.mark.slow
def test_parameter_server_trains_and_an_evaluator_measures_meanwhile(tmp_path: Path) -> None:
    options = ["--workers", "2", "--ps", "1", "--evaluator", str(EXAMPLES / "parameter_server.py")]
    output = run_module("tfstyle_dist.launch", [*options, "--steps", "400", "--directory", str(tmp_path)])
    assert re.search(r"\[chief 0\] test accuracy 0\.9\d+ after 400 steps", output)
    scores = re.findall(r"\[evaluator 0\] step (\d+): test accuracy (\S+)", output)
    assert scores[-1][0] == "400"
    assert float(scores[-1][1]) >= 0.94
    assert ("optimizer/state/model/0.weight/exp_avg", [128, 64]) in tfd.train.list_variables(tmp_path)


@pytest.mark.slow
def test_embedding_recommender_learns_the_hidden_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")  # a bar that is not shown does not count
    options = ["--workers", "2", "--ps", "2", str(EXAMPLES / "embedding_recommender.py"), "--steps", "300"]
    output = run_module("tfstyle_dist.launch", options)
    (error,) = re.findall(r"test error (\S+) after 300 steps", output)
    assert float(error) <= 0.3


@pytest.mark.slow
def test_sync_vs_async_compares_three_forms() -> None:
    output = run("sync_vs_async.py", options=["--examples", "32000"])
    rows = re.findall(r"^(one worker|in step|out of step) +(\d+) +\S+ +(\S+) +\S+$", output, re.MULTILINE)
    assert [(form, steps) for form, steps, _ in rows] == [
        ("one worker", "500"),
        ("in step", "250"),
        ("out of step", "500"),
    ]
    assert all(float(accuracy) >= 0.93 for _, _, accuracy in rows)


@pytest.mark.slow
@in_forms(("two parts", 4, ["--parts", "2"]), ("four parts", 4, ["--parts", "4"]))
def test_model_parallel_agrees_with_the_model_in_one_piece(player: Player, options: list[str]) -> None:
    output = player.play("model_parallel.py", options)
    ((held, elements),) = re.findall(r"each holds (\d+) of (\d+) elements", output)  # the chief alone prints
    assert int(held) < int(elements) * (0.55 if options[-1] == "2" else 0.35)
    (difference,) = re.findall(r"difference (\S+)", output)
    assert float(difference) <= 1e-4
