"""The commands of docs/accelerate.md and the examples' own; the trainer's loss curve against the stock trainer's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "accelerate.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```bash\n(.*)\n```$", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(TRAINER,) = [block for block in BLOCKS if "import Trainer," in block]
MODEL_AND_DATA = """
import torch


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        y = self.line(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


model = Line()
data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(32)]
"""
STEPS = """
print("steps", trainer.state.global_step, "of", trainer.accelerator.num_processes, "processes")
"""
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


def run(command: str) -> str:
    """Runs a command from the root of the project, on the CPU; returns what it printed."""
    program, *arguments = shlex.split(command)
    before = ["-m", MODULES[program]] if program in MODULES else []
    env = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = run_script([*before, *arguments], timeout=200, env=env, cwd=ROOT)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def command_for(example: str, program: str) -> str:
    (found,) = [c for c in COMMANDS if c.startswith(program) and f"examples/{example}" in c]
    return found


def test_the_page_has_these_commands() -> None:
    assert len(COMMANDS) == PAGE.count("```bash") == 3


@pytest.mark.parametrize(
    "command",
    [
        command_for("accelerate_script.py", "torchrun") + " --bf16 --method add_n",
        command_for("accelerate_script.py", "accelerate launch"),
        pytest.param("python examples/accelerate_script.py --replicas 2", marks=pytest.mark.slow),
    ],
)
def test_accelerate_script(command: str) -> None:
    output = run(command)
    ((right, seen),) = re.findall(r"^test accuracy .* \((\d+) of (\d+)\)$", output, re.MULTILINE)
    assert seen == "357"
    assert int(right) / 357 >= 0.94
    assert output.count("2 replica(s)") == output.count("weights come back: True") == 1


def test_trainer_has_the_loss_curve_of_the_stock_trainer() -> None:
    output = run(command_for("trainer_script.py", "torchrun"))
    losses = re.findall(r"^(\w+): 2 process\(es\), loss (\S+) -> (\S+), test \S+$", output, re.MULTILINE)
    assert [name for name, *_ in losses] == ["stock", "add_n", "tree"]
    assert all(float(last) < 0.8 * float(first) for _, first, last in losses)
    ((steps, apart),) = re.findall(r"^losses of (\d+) steps differ by at most (\S+)$", output, re.MULTILINE)
    assert steps == "50"
    assert float(apart) <= 1e-4


def test_the_trainer_of_the_page(tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(MODEL_AND_DATA + TRAINER + STEPS, "utf-8")
    result = run_script([str(program)], nproc=2, timeout=200, env={"CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout.count("steps 6 of 2 processes") == 2  # 3 epochs of 32 samples, 8 for each process
