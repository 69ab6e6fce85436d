"""A closed group, one that is left open and one that is dropped leave none of torch's Gloo threads at the end.

Such a thread may free a tensor while the interpreter ends, which aborts the process after all work is done.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfstyle_dist.testing.runner import run_script

SCRIPT = """
import atexit, contextlib, gc, os, sys, time

def running(seconds=0):
    end = time.monotonic() + seconds
    while True:
        names = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                names.append(open(f"/proc/self/task/{task}/comm").read())
        count = sum("gloo_run" in name for name in names)
        if count == 0 or time.monotonic() >= end:  # one that has ended is listed for a moment longer
            return count
        time.sleep(0.01)

# Registered first, so it runs after the package's own exit handler.
atexit.register(lambda: running(5) and os._exit(3))
import torch
import tfstyle_dist as tfd

def train():
    strategy = tfd.MirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert running() > 0
    return strategy

strategy = train()
if "close" in sys.argv:
    strategy.close()
    assert running(5) == 0
if "drop" in sys.argv:
    del strategy
    gc.collect()
"""

OUTLIVES = """
import copy
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import tfstyle_dist as td

sys.setswitchinterval(10)  # a thread of Gloo that wants Python's lock gets it only when this thread waits
strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
for _ in range(200):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    if "copied" in sys.argv:
        model = copy.deepcopy(model)
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    del model
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.startswith(("2.9.", "2.10.")), reason="this torch gives its threads no names")
@pytest.mark.parametrize(
    ("options", "shared"),
    [(["close"], "1"), ([], "1"), (["drop"], "0")],
    ids=["closed", "left open", "dropped, over sockets"],
)
def test_no_gloo_thread_is_left(options: list[str], shared: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = run_script([script, *options], nproc=2, timeout=120, env={"TFSTYLE_SHARED_MEMORY": shared})
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["copied"]], ids=["made", "copied"])
def test_a_model_that_outlives_its_group_frees_it(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OUTLIVES, encoding="utf-8")
    result = run_script([script, *options], timeout=40)
    assert result.returncode == 0, result.stderr
