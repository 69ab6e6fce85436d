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
    "llvmlite",
    "torch_xla",
    "accelerate",
    "ray",
    "lightning",
    "lightning_fabric",
    "keras",
    "matplotlib",
    "kubernetes",
    "googleapiclient",
    "transformers",
    "sklearn",
    "zmq",
    "tensorboard",
)


# Every public name is loaded on first use.
EVERYTHING = "import tfstyle_dist\nfor name in tfstyle_dist.__all__: getattr(tfstyle_dist, name)"
OTHERS = ("coordinator", "parameter_server", "tpu", "train", "strategies.tpu", "strategies.parameter_server")


def modules_after(statement: str) -> set[str]:
    """The modules a fresh interpreter has loaded after ``statement``."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_is_light() -> None:
    added = modules_after(EVERYTHING) - modules_after("import torch")
    assert "tfstyle_dist" in added
    heavy = {package for package in EXPENSIVE for module in added if starts_with(module, package)}
    assert not heavy, f"import these where they are used, not at the top of a module: {sorted(heavy)}"


def test_a_strategy_is_loaded_without_the_others() -> None:
    loaded = modules_after("import tfstyle_dist; tfstyle_dist.MultiWorkerMirroredStrategy, tfstyle_dist.get_strategy")
    others = {f"tfstyle_dist.{name}" for name in OTHERS}
    assert not loaded & others
