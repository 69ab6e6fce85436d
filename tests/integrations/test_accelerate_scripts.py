"""accelerate's own test scripts, from its wheel, with ``StrategyAccelerator`` in the place of ``Accelerator``.

Which of them the class of accelerate itself passes on two CPU ranks is in docs/status.md; all of those must pass here.
"""

from __future__ import annotations

import re
from pathlib import Path

import local_hub
import pytest

from tfstyle_dist.testing.runner import run_script

DRIVER = Path(__file__).with_name("accelerate_scripts.py")
METHODS = ("ADD_N", "TREE")
EXTERNAL = "scripts.external_deps"
SCRIPTS = {
    "test_ops": "scripts.test_ops",
    "test_metrics": f"{EXTERNAL}.test_metrics",
    "test_sync": "scripts.test_sync",
    "test_performance": f"{EXTERNAL}.test_performance --num_epochs 2 --performance_lower_bound 0.6",
    "test_checkpointing": f"{EXTERNAL}.test_checkpointing --output_dir saved --partial_train_epoch 1",
    "test_checkpointing (resumed)": f"{EXTERNAL}.test_checkpointing --output_dir saved "
    "--resume_from_checkpoint saved/epoch_0",
    "test_distributed_data_loop": "scripts.test_distributed_data_loop",
    "test_script": "scripts.test_script",
}
TRAINS = {"test_sync", "test_performance", "test_checkpointing", "test_distributed_data_loop", "test_script"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    local_hub.make(folder)
    return folder


@pytest.fixture(scope="module")
def lines(hub: Path) -> list[tuple[str, ...]]:
    """Method, result, script and number of sums; one job, because starting it is half of the time."""
    env = {"HF_HOME": str(hub / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = run_script([DRIVER, ",".join(METHODS), *SCRIPTS.values()], nproc=2, timeout=240, env=env, cwd=hub)
    found = re.findall(r"^(\w+) (pass|fail) (\w+) [\d.]+ s, (\d+) sums$", done.stdout, re.M)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return found


@pytest.mark.parametrize("method", METHODS)
def test_they_pass(method: str, lines: list[tuple[str, ...]]) -> None:
    mine = [entry for entry in lines if entry[0] == method]
    assert [(result, name) for _, result, name, _ in mine] == [("pass", key.split()[0]) for key in SCRIPTS]
    sums = {key: int(number) for key, (*_, number) in zip(SCRIPTS, mine, strict=True)}
    assert {key for key, number in sums.items() if number > 0} == TRAINS, sums
