"""Tests of several processes use the package's own plugin; those that start processes in another way say why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
RECORDED = "the programs recorded on TensorFlow run in forked children, as they were recorded"
COMMANDS = "command lines, launchers and signals are what is tested"
REASONS = {
    "architecture/test_bare_install.py": "a fresh interpreter",
    "architecture/test_import_cost.py": "a fresh interpreter",
    "architecture/test_extras.py": "pip and the environments that it makes are what is tested",
    "architecture/test_packaging.py": "pip and build are commands",
    "integrations/accelerate_suite.py": "pip, and pytest on tests of another package",
    "integrations/on_ray/test_without_ray.py": "a fresh interpreter",
    "integrations/test_fabric.py": "Fabric, which starts processes itself, and the commands of launchers",
    "comm/forking.py": "ranks that fork are what is tested",
    "comm/test_diagnosis.py": "needs the id of a process that is gone",
    "comm/test_free_ports.py": "another process that looks for a port",
    "comm/test_rendezvous.py": "needs the id of a process that is gone",
    "runtime/test_openmp_pools.py": "what a forked child may not do",
    "shm/test_memory_file.py": "children that a rank forks",
    "comm/test_stacks.py": "another user, and a process that has no free file",
    "compare_aggregation/test_compare_aggregation.py": COMMANDS,
    "conformance": RECORDED,
    "containers.py": "asks whether pid namespaces can be made",
    "elastic": "workers that are killed, with torch imported once",
    "faults/checkpoint_crashes.py": "children that die while they save, with torch imported once",
    "faults/test_checkpoint_elastic.py": "hosts under torchrun",
    "faults/test_ranks_in_containers.py": "ranks in pid namespaces of their own",
    "faults/test_in_process.py": "what a forked child may not do",
    "foreign": "programs in forked children with a limit each, so that a hang is a result",
    "gpu/check.py": COMMANDS,
    "faults/test_scripts.py": "Ctrl-C, the debugger and the end of a program are of a whole program",
    "input/test_moved_batches.py": "what a forked child may not do",
    "kernels/compile_kernels.py": "asks a tool of CUDA",
    "launch": COMMANDS,
    "multi_worker/cluster_processes.py": "programs in network namespaces, started by TF_CONFIG alone",
    "multi_worker/test_torchrun_configs.py": COMMANDS,
    "multi_worker/test_two_hosts.py": COMMANDS,
    "ops/test_threads.py": "counts the threads of a fresh process",
    "parameter_server": "servers and workers are no ranks: they come, die and come back beside one coordinator",
    "pretend_accelerator": "a compiler, and sessions of pytest whose process has a backend of its own",
    "pretend_system/sitecustomize.py": "imports what it must not change",
    "started_together.py": "the commands of the engines, and programs whose process groups other libraries make",
    "test_examples.py": COMMANDS,
    "test_site.py": "MkDocs and a browser are commands",
    "testing": "sessions of pytest, and processes that a test leaves behind, are what is tested",
    "xla": "not run by default",
}


def starts_processes(tree: ast.Module) -> bool:
    """Whether a module imports a way to start processes, or forks."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(name.partition(".")[0] in ("subprocess", "multiprocessing") for name in names):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in ("fork", "spawn"):
            return True
    return False


FILES = sorted(path for path in TESTS.rglob("*.py") if starts_processes(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_another_way_has_a_reason(path: Path) -> None:
    place = path.relative_to(TESTS)
    assert {str(place), *map(str, place.parents)} & REASONS.keys(), (
        "use @pytest.mark.distributed (docs/testing.md) or tfstyle_dist.testing.runner.run_script, or give the reason "
        "in REASONS"
    )
