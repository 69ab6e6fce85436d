"""As ``test_torch_internals.py``: what only accelerators need."""

from __future__ import annotations

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.testing.runner import run_script


def test_writes_to_lists_are_known_by_name() -> None:
    """And each writes to its first argument; on the CPU its tensors are marked, which a GPU's kernels do not do."""
    assert {"_foreach_copy_", "_foreach_lerp_", "_foreach_zero_"} < set(torch_internals.LIST_WRITES)
    for name in torch_internals.LIST_WRITES:
        found = [torch._C._jit_get_schemas_for_operator(f"aten::{name}")[0].arguments[0]]
        assert all(argument.alias_info.is_write for argument in found), name


def test_graphs_of_compiled_functions_are_known_in_every_thread() -> None:
    program = """
import threading, torch, torch._dynamo, torch._inductor.cudagraph_trees as trees
from tfstyle_dist.core import torch_internals
def known():
    try:
        found.append(trees.get_obj(trees.local, "tree_manager_containers"))
    except AssertionError:
        found.append(None)
found = []
for share in (False, True):
    if share:
        torch_internals.share_graph_trees()
    for thread in (threading.Thread(target=known), threading.Thread(target=known)):
        thread.start()
        thread.join()
known()
assert found[:2] == ([{}, {}] if torch.__version__ >= (2, 13) else [None, None]), found  # since torch 2.13
assert None not in found[2:], found
"""
    result = run_script(["-c", program])
    assert result.returncode == 0, result.stderr
