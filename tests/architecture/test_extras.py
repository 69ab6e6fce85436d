"""Each extra alone, installed into an environment of its own, imports what it promises: ``make test-extras``.

Needs a package index. Of ``[gpu]`` and ``[tpu]`` nothing is installed: those packages are larger than everything else
together, and do nothing without the hardware.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from source_tree import ROOT

EXTRAS = {
    "accelerate": "from tfstyle_dist.integrations.accelerate import StrategyAccelerator",
    "cpu": "import llvmlite, tfstyle_dist_kernels.cpu.cpu_llvm",
    "docs": "import material, mkdocs, mkdocstrings_handlers.python",
    "gce": "import googleapiclient.discovery; from tfstyle_dist.cluster_resolver import GCEClusterResolver",
    "keras": "from tfstyle_dist.integrations import keras",
    "kubernetes": "import kubernetes.client; from tfstyle_dist.cluster_resolver import KubernetesClusterResolver",
    "lightning": "from tfstyle_dist.integrations.fabric import TfdFabricStrategy",
    "plot": "from tfstyle_dist.monitoring import figure; assert figure.missing() is None; figure.new_figure(1, 1)",
    "ps": "import cloudpickle; from tfstyle_dist.parameter_server.protocol import zeromq_sockets as z; z.load()",
    "ray": "from tfstyle_dist.integrations.ray import TfdConfig, parameter_server_cluster",
    "tensorboard": "import torch.utils.tensorboard",
}
NOT_PROMISED = {"all", "dev", "examples", "foreign", "test"}
TOO_LARGE = {"gpu", "tpu"}
SECONDS = 600

pytestmark = [pytest.mark.timeout(SECONDS + 60)]


def extras() -> set[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return set(config["options.extras_require"])


def test_every_extra_is_here() -> None:
    assert extras() == set(EXTRAS) | NOT_PROMISED | TOO_LARGE


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([str(part) for part in command], env=clean, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.slow
@pytest.mark.skipif("TFSTYLE_TEST_EXTRAS" not in os.environ, reason="installs packages from an index: make test-extras")
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone(extra: str, tmp_path: Path) -> None:
    """With the running torch, of the same version, in the place of one that the index would give."""
    python = tmp_path / "venv" / "bin" / "python"
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    # Links to torch and to what it needs alone: anything else of the running environment must come from the extra.
    running = Path(torch.__file__).parents[1]
    for name in ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"):
        if (running / name).is_dir():
            (site / name).symlink_to(running / name)
    for info in running.glob("*.dist-info"):
        if info.name.partition("-")[0].lower() in (
            "torch",
            "sympy",
            "mpmath",
            "networkx",
            "jinja2",
            "markupsafe",
            "fsspec",
        ):
            (site / info.name).symlink_to(info)
    for single in ("typing_extensions", "filelock"):
        found = [*running.glob(f"{single}.py"), *running.glob(single), *running.glob(f"{single}-*.dist-info")]
        for path in found:
            (site / path.name).symlink_to(path)
    installed = run(python, "-m", "pip", "install", "--quiet", f"{ROOT}[{extra}]")
    assert installed.returncode == 0, installed.stderr
    done = run(python, "-W", "ignore", "-c", EXTRAS[extra])
    assert done.returncode == 0, done.stderr
