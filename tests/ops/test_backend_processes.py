"""The CPU backend in fresh processes: forks, a missing numba, and loading in the background."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import CompletedScript, run_script

pytestmark = pytest.mark.timeout(150)

FORK = """
import os, sys, torch
from tfstyle_dist.ops import aggregate
torch.set_num_threads(2)
xs = [torch.randn(300_000) for _ in range(4)]
expected = aggregate(xs, backend="numba")
pid = os.fork()
if pid == 0:
    torch.set_num_threads(2)
    same = all(torch.equal(aggregate(xs, backend="numba"), expected) for _ in range(5))
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(aggregate(xs, backend="numba"), expected)
"""
FORK_WHILE_LOADING = """
import os, threading, torch
from tfstyle_dist.ops import aggregate
from tfstyle_dist_kernels import cpu_sum
holding, go_on = threading.Event(), threading.Event()

def load():
    with cpu_sum._lock:
        holding.set()
        go_on.wait()

thread = threading.Thread(target=load)
thread.start()
holding.wait()
pid = os.fork()
if pid == 0:
    reason = cpu_sum.unavailable()
    try:
        aggregate([torch.ones(3)] * 2, backend="numba")
        os._exit(1)
    except ValueError as error:
        os._exit(0 if "forked while its parent was loading" in str(error) else 2)
go_on.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert cpu_sum.unavailable() is None
"""
WITHOUT_NUMBA = """
import logging, sys, importlib.abc, torch
logging.basicConfig(level=logging.INFO)
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "numba":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "numba" else found(name, package)
sys.meta_path.insert(0, Blocked())
from tfstyle_dist.ops import aggregate, explain
xs = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(3):
    assert torch.equal(aggregate(xs), torch.full((1 << 20,), 8.0))
assert explain(8, 64 << 20, torch.float32).startswith("ADD_N in torch on cpu")
try:
    aggregate(xs, backend="numba")
except ValueError as error:
    print(error)
assert "numba" not in sys.modules
"""
WARM_UP = """
import logging, sys, threading, torch
logging.basicConfig(level=logging.INFO)
logging.getLogger("tfstyle_dist").setLevel(logging.INFO)
from tfstyle_dist.ops import aggregate, aggregate_list, explain
small = [torch.randn(1000) for _ in range(3)]
for _ in range(100):
    aggregate(small)
assert "numba" not in sys.modules
xs = [torch.randn(3 << 20) for _ in range(8)]
first = aggregate(xs)
assert "numba" not in sys.modules, "the first sum must not wait for numba"
for _ in range(400):
    aggregate(xs, out=first)
    names = [t.name for t in threading.enumerate()]
    if "tfstyle-load-numba" in names:
        break
assert "tfstyle-load-numba" in names
for thread in threading.enumerate():
    if thread.name == "tfstyle-load-numba":
        thread.join()
assert torch.equal(aggregate(xs), first)
print(explain(8, 12 << 20, torch.float32))
"""


TRITON = """
import torch
from tfstyle_dist import AggregationMethod
from tfstyle_dist.ops import aggregate, aggregate_list
torch.manual_seed(0)
replicas = [[torch.randn(300), torch.randn(7, 5), torch.tensor(2.5)] for _ in range(11)]
for method in (AggregationMethod.ADD_N, AggregationMethod.TREE, AggregationMethod.EXPERIMENTAL_ACCUMULATE_N):
    compiled = aggregate_list(replicas, method, divisor=11, backend="triton")
    plain = aggregate_list(replicas, method, divisor=11, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))
weight, out = torch.ones(300, requires_grad=True), torch.ones(300)
loss = (weight * out).sum()
aggregate([row[0] for row in replicas], out=out, backend="triton")
try:
    loss.backward()
except RuntimeError as error:
    assert "modified by an inplace operation" in str(error)
    print("seen")
"""


def run(program: str, directory: Path, **env: str) -> CompletedScript:
    script = directory / "program.py"
    script.write_text(program, encoding="utf-8")
    result = run_script([script], env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.parametrize("program", [FORK, FORK_WHILE_LOADING], ids=["after a sum", "while loading"])
def test_fork(program: str, tmp_path: Path) -> None:
    run(program, tmp_path)


def test_triton_through_the_dispatcher(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert run(TRITON, tmp_path, TRITON_INTERPRET="1").stdout == "seen\n"


def test_without_numba(tmp_path: Path) -> None:
    result = run(WITHOUT_NUMBA, tmp_path, TFSTYLE_LOG_LEVEL="INFO")
    assert "backend='numba' was asked for, but numba is not installed: pip install 'tfstyle_dist[cpu]'" in result.stdout
    assert result.stderr.count("auto takes torch (numba is not installed") == 1


def test_numba_is_loaded_in_the_background_when_it_pays(tmp_path: Path) -> None:
    result = run(WARM_UP, tmp_path)
    assert result.stdout.startswith("ADD_N in numba on cpu")
    assert result.stderr.count("loading the numba backend for torch.float32 in the background") == 1
    assert result.stderr.count("auto takes numba") == 1
