"""The CPU backend in fresh processes: forks, a missing compiler, and compiling when it pays."""

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
expected = aggregate(xs, backend="llvm")
pid = os.fork()
if pid == 0:
    torch.set_num_threads(2)
    sums = [aggregate(xs, backend="llvm") for _ in range(5)]
    torch.set_num_threads(1)  # torch itself would wait for threads that only its parent has
    same = all(torch.equal(total, expected) for total in sums)
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(aggregate(xs, backend="llvm"), expected)
"""
FORK_WHILE_COMPILING = """
import os, threading, torch
from tfstyle_dist.ops import aggregate
from tfstyle_dist_kernels.cpu import cpu_compile
holding, go_on = threading.Event(), threading.Event()

def compile_a_sum():
    with cpu_compile._lock:
        holding.set()
        go_on.wait()

thread = threading.Thread(target=compile_a_sum)
thread.start()
holding.wait()
pid = os.fork()
if pid == 0:
    reason = cpu_compile.unavailable()
    try:
        aggregate([torch.ones(3)] * 2, backend="llvm")
        os._exit(1)
    except ValueError as error:
        os._exit(0 if "forked while its parent was compiling" in str(error) else 2)
go_on.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert cpu_compile.unavailable() is None
"""
WITHOUT_LLVM = """
import logging, sys, importlib.abc, torch
logging.basicConfig(level=logging.INFO)
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "llvmlite":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "llvmlite" else found(name, package)
sys.meta_path.insert(0, Blocked())
from tfstyle_dist.ops import aggregate, explain
xs = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(3):
    assert torch.equal(aggregate(xs), torch.full((1 << 20,), 8.0))
assert explain(8, 64 << 20, torch.float32).startswith("ADD_N in torch on cpu")
try:
    aggregate(xs, backend="llvm")
except ValueError as error:
    print(error)
from tfstyle_dist.ops import streamed
x, out = torch.randn(2 << 20), torch.empty(2 << 20)
for _ in range(3):
    streamed.add(x, x, -0.1, out)
    assert torch.equal(out, torch.add(x, x, alpha=-0.1))
    streamed.copy_bytes(x.view(torch.uint8), out.view(torch.uint8))
    assert torch.equal(out, x)
assert "llvmlite" not in sys.modules
"""
COMPILED_LATER = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
logging.getLogger("tfstyle_dist").setLevel(logging.INFO)
from tfstyle_dist.ops import aggregate, explain
small = [torch.randn(1000) for _ in range(3)]
for _ in range(100):
    aggregate(small)
assert "llvmlite" not in sys.modules
xs = [torch.randn(3 << 20) for _ in range(8)]
first = aggregate(xs)
assert "llvmlite" not in sys.modules, "one sum does not pay for compiling"
for _ in range(400):
    assert torch.equal(aggregate(xs), first)
    if "llvmlite" in sys.modules:
        break
assert "llvmlite" in sys.modules
assert torch.equal(aggregate(xs), first)
print(explain(8, 12 << 20, torch.float32))
"""
BROKEN_COMPILER = """
import torch
from tfstyle_dist.ops import aggregate, backends
from tfstyle_dist_kernels.cpu import cpu_sum
def fail(*key):
    raise OSError("no executable memory")
cpu_sum.prepare, backends.COMPILING_SECONDS = fail, 0.0
xs = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(3):
    assert torch.equal(aggregate(xs), torch.full((1 << 20,), 8.0))
"""


TRITON = """
import torch
from tfstyle_dist import AggregationMethod
from tfstyle_dist.ops import aggregate, aggregate_list
from tfstyle_dist_kernels.triton import triton_sum
if reason := triton_sum.unavailable():
    print(f"the Triton kernels cannot run: {reason}", end="")
    raise SystemExit
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


@pytest.mark.parametrize("program", [FORK, FORK_WHILE_COMPILING], ids=["after a sum", "while compiling"])
def test_fork(program: str, tmp_path: Path) -> None:
    run(program, tmp_path)


def test_triton_through_the_dispatcher(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    said = run(TRITON, tmp_path, TRITON_INTERPRET="1").stdout
    if said.startswith("the Triton kernels cannot run: the interpreter of triton"):
        pytest.skip(said)
    assert said == "seen\n"


def test_without_llvmlite(tmp_path: Path) -> None:
    result = run(WITHOUT_LLVM, tmp_path, TFSTYLE_LOG_LEVEL="INFO")
    assert (
        "backend='llvm' was asked for, but llvmlite is not installed: pip install llvmlite (the extra 'cpu'"
        in result.stdout
    )
    assert result.stderr.count("auto takes torch (llvmlite is not installed") == 1


def test_a_sum_is_compiled_when_it_pays(tmp_path: Path) -> None:
    result = run(COMPILED_LATER, tmp_path)
    assert result.stdout.startswith("ADD_N in llvm on cpu")
    assert result.stderr.count("compiled the sum of 8 x float32") == 1
    assert result.stderr.count("auto takes llvm") == 1


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    result = run(BROKEN_COMPILER, tmp_path)
    assert result.stderr.count("no executable memory") == 1
