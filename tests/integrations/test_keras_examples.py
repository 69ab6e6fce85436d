"""The Keras examples in the forms that they name, and the code of docs/keras.md."""

from __future__ import annotations

import re
from pathlib import Path

import keras_models
import pytest
from example_runs import EXAMPLES, Player, in_forms

from tfstyle_dist.testing.runner import run_script

pytestmark = keras_models.QUIET
ROOT = EXAMPLES.parent
PAGE = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FORMS = in_forms(("threads", 0, ["--replicas", "2"]), ("ranks", 2, []))


@FORMS
def test_keras_fit(player: Player, options: list[str]) -> None:
    output = player.play("keras_fit.py", options)
    assert output.count("Epoch 1/8") == 1  # the chief alone shows progress
    ((accuracy, right),) = re.findall(r"accuracy (0\.\d+) \((\d+) of 357\)", output)
    assert float(accuracy) == pytest.approx(int(right) / 357, abs=6e-4)
    (apart,) = re.findall(r"largest difference of a loss to one device: (\S+)", output)
    assert float(apart) < 1e-4


@FORMS
def test_save_and_load(player: Player, options: list[str]) -> None:
    output = player.play("save_and_load.py", options)
    assert output.count(f"trained on 2, loaded on 1 and {3 if options else 2}") == 2
    assert len(re.findall(r"test accuracy 0\.9\d+, largest difference after loading", output)) == 2


@pytest.mark.slow
def test_multi_worker_keras_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(*argv: str, nproc: int = 1) -> str:
        result = run_script(argv, nproc=nproc, timeout=150, env={"CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": None})
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        return result.stdout

    example = [str(EXAMPLES / "multi_worker_keras.py"), "--directory", str(tmp_path), "--epochs"]
    output = run("-m", "tfstyle_dist.launch", "--workers", "2", *example, "5")
    assert "epochs [1, 2, 3, 4, 5] on 2 replicas" in output
    lines = [set(re.findall(rf"worker {w} (epoch \d+: .*)", output)) for w in range(2)]
    assert len(lines[0]) == 5
    assert lines[0] == lines[1]  # the same numbers on both
    ((accuracy, right),) = re.findall(r"test accuracy (\S+) \((\d+) of 357\)", output)
    assert float(accuracy) == pytest.approx(int(right) / 357, abs=6e-4)
    output = run(*example, "6", nproc=2)
    assert "epochs [6] on 2 replicas" in output


def test_commands_of_the_page_are_those_of_the_examples() -> None:
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in commands.splitlines():
        (name,) = re.findall(r"examples/\w+\.py", line)
        shown = [known.split("  ")[0].strip() for known in (ROOT / name).read_text("utf-8").split("    ")]
        assert line in shown, f"{name} does not show {line!r} at its top"


def test_code_of_the_page_runs(tmp_path: Path) -> None:
    """The first two blocks, as they stand; for servers see test_keras_servers and test_keras_server_loops."""
    assert len(BLOCKS) == 4
    program = tmp_path / "page.py"
    program.write_text(BLOCKS[0] + BLOCKS[1], "utf-8")
    result = run_script([str(program)], timeout=150, env={"CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": None})
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    output = result.stdout
    assert output.count("Epoch 20/20") == 1
    assert "(500, 2)" in output
    loss, accuracy = map(float, output.splitlines()[-1].split())
    assert loss < 5
    assert 0 < accuracy < 1
