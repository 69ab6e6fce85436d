"""A closed group, and one that is left open at the end of the program, leaves none of torch's Gloo threads.

Such a thread may free a tensor while the interpreter ends, which aborts the process after all work is done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

SCRIPT = """
import atexit, os, sys

def running():
    threads = [open(f"/proc/self/task/{n}/comm").read() for n in os.listdir("/proc/self/task")]
    return sum("gloo_run" in name for name in threads)

# Registered first, so it runs after the package's own exit handler.
atexit.register(lambda: running() and os._exit(3))
import torch
import tfstyle_dist as tfd

strategy = tfd.MirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()

strategy.run(step)
assert running() > 0
if "close" in sys.argv:
    strategy.close()
    assert running() == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["close"], []], ids=["closed", "left open"])
def test_no_gloo_thread_is_left(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = run_script([script, *options], nproc=2, timeout=120)
    assert result.returncode == 0, result.stderr
