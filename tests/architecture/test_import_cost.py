"""Importing the package loads nothing expensive that ``import torch`` does not load itself."""

from __future__ import annotations

import json
import subprocess
import sys

from source_tree import starts_with

EXPENSIVE = (
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor",
    "triton",
    "numba",
    "torch_xla",
    "accelerate",
    "keras",
    "matplotlib",
    "kubernetes",
    "googleapiclient",
    "transformers",
    "sklearn",
    "zmq",
    "tensorboard",
)


def modules_after(statement: str) -> set[str]:
    """The modules a fresh interpreter has loaded after ``statement``."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_is_light() -> None:
    added = modules_after("import tfstyle_dist.api") - modules_after("import torch")
    assert "tfstyle_dist" in added
    heavy = {package for package in EXPENSIVE for module in added if starts_with(module, package)}
    assert not heavy, f"import these where they are used, not at the top of a module: {sorted(heavy)}"
