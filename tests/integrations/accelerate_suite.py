"""Runs the test files of accelerate's own source package with ``StrategyAccelerator`` in the place of ``Accelerator``.

    python tests/integrations/accelerate_suite.py [SDIST] [-- arguments of pytest]

Without SDIST the source package of the installed version of accelerate is fetched with pip. ``--stock`` before the
arguments leaves accelerate's own class in its place, to see which tests it passes itself. Exit status 5: nothing could
be fetched; the last line says why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

FILES = (
    "accelerator", "scheduler", "optimizer", "grad_sync", "cpu", "state_checkpointing", "data_loader", "tracking",
)  # fmt: skip
NOTHING_FETCHED = 5
_PIP_SECONDS = 120
_HELPERS = ("parameterized",)
"""What the tests import and accelerate itself does not need."""


def pytest_configure() -> None:
    """As a plugin of pytest: puts the class in its place before the test files are imported."""
    import accelerate
    import accelerate.accelerator

    from tfstyle_dist.integrations.accelerate import StrategyAccelerator

    accelerate.Accelerator = StrategyAccelerator
    accelerate.accelerator.Accelerator = StrategyAccelerator


def _pip(*arguments: str) -> None:
    """Runs pip.

    Raises:
        RuntimeError: it failed, e.g. without a network; the message is pip's last line.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip {arguments[0]} took longer than {_PIP_SECONDS} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["pip gave no reason"])[-1])


def fetch(folder: Path) -> Path:
    """The source package of the installed accelerate.

    Args:
        folder: where to put it.

    Raises:
        RuntimeError: it cannot be had; the message says why.
    """
    wanted = f"accelerate=={version('accelerate')}"
    _pip("download", "--no-binary", "accelerate", "--no-deps", "--dest", str(folder), wanted)
    return next(folder.glob("accelerate-*.tar.gz"))


def run(sdist: Path, folder: Path, stock: bool, arguments: Sequence[str]) -> int:
    """Runs the test files; pytest's exit status.

    Args:
        sdist: the source package.
        folder: for its files, and for what the tests need beside it.
        stock: whether accelerate's own class stays.
        arguments: of pytest.

    Raises:
        RuntimeError: a package that the tests import cannot be had.
    """
    _pip("install", "--no-deps", "--target", str(folder / "helpers"), *_HELPERS)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    root = next(path for path in folder.glob("accelerate-*") if path.is_dir())
    here = str(Path(__file__).resolve().parent)
    paths = [here, str(folder / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    files = [f"tests/test_{name}.py" for name in FILES]
    plugins = ["-p", "no:cacheprovider", *([] if stock else ["-p", "accelerate_suite"])]
    options = ["-c", os.devnull, "--rootdir", str(root), "--timeout", "120", "-q", "-rfE", *plugins]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files, *arguments], cwd=root, env=environment
    ).returncode


def main() -> int:
    """The exit status: pytest's, or ``NOTHING_FETCHED``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sdist", nargs="?", type=Path, help="accelerate-<version>.tar.gz; default: fetched with pip")
    parser.add_argument("--stock", action="store_true", help="leave accelerate's own class in its place")
    own, arguments = sys.argv[1:], []
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory(prefix="tfstyle-accelerate-") as name:
        try:
            sdist = options.sdist or fetch(Path(name))
            return run(sdist.resolve(), Path(name), options.stock, arguments)
        except RuntimeError as error:
            print(f"accelerate's tests were not run: {error}")
            return NOTHING_FETCHED


if __name__ == "__main__":
    sys.exit(main())
