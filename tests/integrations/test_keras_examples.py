"""The Keras examples in the forms that they name, and the code of docs/keras.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

ROOT = Path(__file__).resolve().parents[2]
CPU = {"CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": None}
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "keras.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
)


def run(*argv: str | Path, nproc: int = 1) -> str:
    result = run_script(argv, nproc=nproc, timeout=150, env=CPU)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "options"), [(1, ["--replicas", "2"]), (2, [])], ids=["threads", "torchrun"])
def test_keras_fit(nproc: int, options: list[str]) -> None:
    output = run(ROOT / "examples" / "keras_fit.py", *options, nproc=nproc)
    assert output.count("Epoch 1/8") == 1  # the chief alone shows progress
    ((accuracy, right),) = re.findall(r"accuracy (0\.\d+) \((\d+) of 357\)", output)
    assert float(accuracy) == pytest.approx(int(right) / 357, abs=6e-4)
    (apart,) = re.findall(r"largest difference of a loss to one device: (\S+)", output)
    assert float(apart) < 1e-4


@pytest.mark.slow
def test_multi_worker_keras_goes_on_where_it_was(tmp_path: Path) -> None:
    example = ROOT / "examples" / "multi_worker_keras.py"
    launch = ["-m", "tfstyle_dist.launch", "--workers", "2"]
    output = run(*launch, str(example), "--directory", str(tmp_path), "--epochs", "5")
    assert "epochs [1, 2, 3, 4, 5] on 2 replicas" in output
    lines = [set(re.findall(rf"worker {w} (epoch \d+: .*)", output)) for w in range(2)]
    assert len(lines[0]) == 5
    assert lines[0] == lines[1]  # the same numbers on both
    ((accuracy, right),) = re.findall(r"test accuracy (\S+) \((\d+) of 357\)", output)
    assert float(accuracy) == pytest.approx(int(right) / 357, abs=6e-4)
    output = run(example, "--directory", str(tmp_path), "--epochs", "6", nproc=2)
    assert "epochs [6] on 2 replicas" in output


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "options"), [(1, ["--replicas", "2"]), (2, [])], ids=["threads", "torchrun"])
def test_save_and_load(nproc: int, options: list[str]) -> None:
    output = run(ROOT / "examples" / "save_and_load.py", *options, nproc=nproc)
    other = 3 if nproc == 1 else 2
    assert output.count(f"trained on 2, loaded on 1 and {other}") == 2
    assert len(re.findall(r"test accuracy 0\.9\d+, largest difference after loading", output)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_code_of_the_page_runs(tmp_path: Path, nproc: int) -> None:
    """The first block, with its command under torchrun too; the one of parameter servers is in test_keras_servers."""
    script = tmp_path / "train.py"
    source = (
        BLOCKS[0] if nproc == 1 else BLOCKS[0].replace('MirroredStrategy(["cpu:0", "cpu:1"])', "MirroredStrategy()")
    )
    script.write_text(source, encoding="utf-8")
    result = run_script([script], nproc=nproc, env={**CPU, "KERAS_BACKEND": "torch"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Epoch 20/20") == 1
    assert result.stdout.count("(500, 2)") == nproc
    assert len(BLOCKS) == 2
