"""accelerate's own test scripts, from its wheel, with ``StrategyAccelerator`` in the place of ``Accelerator``.

Which of them the class of accelerate itself passes on two CPU ranks is in docs/status.md; all of those must pass here.
"""

from __future__ import annotations

import re
from pathlib import Path

import local_hub

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


def test_they_pass_for_both_methods(tmp_path: Path) -> None:
    """In one job: starting it, with transformers and datasets, is half of the time."""
    local_hub.make(tmp_path)
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = run_script([DRIVER, ",".join(METHODS), *SCRIPTS.values()], nproc=2, timeout=240, env=env, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = re.findall(r"^(\w+) (pass|fail) (\w+) [\d.]+ s, (\d+) sums$", done.stdout, re.M)
    for method in METHODS:
        mine = [entry for entry in lines if entry[0] == method]
        assert [(result, name) for _, result, name, _ in mine] == [("pass", key.split()[0]) for key in SCRIPTS]
        sums = {key: int(number) for key, (*_, number) in zip(SCRIPTS, mine, strict=True)}
        assert {key for key, number in sums.items() if number > 0} == TRAINS, sums
