"""A Ray of this machine for all tests of this folder; without Ray they are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FOUND = importlib.util.find_spec("ray") is not None

collect_ignore = [] if FOUND else [path.name for path in HERE.glob("test_*.py") if path.name != "test_without_ray.py"]


def environment() -> dict[str, str]:
    """Where Ray's processes find the package under test, this folder and that of the elastic tests."""
    folders = (HERE, HERE.parents[1] / "elastic", HERE.parents[2])
    paths = [*map(str, folders), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ray on this machine, with room for 4 tasks."""
    import ray

    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")  # of a busy machine
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": environment()},
        configure_logging=False,
    )
    yield ray
    ray.shutdown()
