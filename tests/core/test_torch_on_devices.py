"""As ``test_torch_internals.py``: what only accelerators need."""

from __future__ import annotations

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.testing.runner import run_script


def test_writes_to_lists_are_known_by_name() -> None:
    """Each writes to its first argument; on the CPU the first kind marks it, the other one never does."""
    assert {"_foreach_copy_", "_foreach_lerp_", "_foreach_zero_"} < set(torch_internals.LIST_WRITES)
    assert {"_fused_sgd_", "_amp_foreach_non_finite_check_and_unscale_"} < set(torch_internals.UNMARKED_WRITES)
    for name in (*torch_internals.LIST_WRITES, *torch_internals.UNMARKED_WRITES):
        first = torch._C._jit_get_schemas_for_operator(f"aten::{name}")[0].arguments[0]
        assert first.alias_info.is_write, name
    written = [torch.ones(2)]
    torch._foreach_zero_(written)
    assert torch_internals.version_of(written[0]) == 1
    torch._amp_foreach_non_finite_check_and_unscale_(written, torch.zeros(1), torch.ones(1))
    assert torch_internals.version_of(written[0]) == 1


def test_graphs_of_compiled_functions_are_known_in_every_thread() -> None:
    """With a torch that sees to it itself (2.13), it is left alone."""
    program = """
import threading, torch, torch._dynamo, torch._inductor.cudagraph_trees as trees
from tfstyle_dist.core import torch_internals
found = []
def known():
    try:
        found.append(trees.get_obj(trees.local, "tree_manager_containers"))
    except AssertionError:
        found.append(None)
if torch.__version__ >= (2, 13):
    torch_internals.share_graph_trees()
    assert isinstance(trees.local, threading.local)
else:
    for share in (lambda: None, torch_internals.share_graph_trees):
        share()
        thread = threading.Thread(target=known)
        thread.start()
        thread.join()
        known()
    assert found[0] is None and found[1] is found[2] is found[3] == {}, found
"""
    result = run_script(["-c", program])
    assert result.returncode == 0, result.stderr
