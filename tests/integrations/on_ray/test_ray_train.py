"""Strategies in the training functions of Ray Train, under ``TfdConfig`` and under Ray's own ``TorchConfig``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray_training as training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),  # Ray warns of its own code
]


def fit(
    torch_config: Any, tmp_path: Path, workers: Any = 2, function: Any = None, failures: int = 0, **config: Any
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = tmp_path / "checkpoints"
    folder.mkdir()
    trainer = TorchTrainer(
        function or training.train,
        train_loop_config={"folder": str(folder), **config},
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=failures)
        ),
    )
    return trainer.fit()


def check(tmp_path: Path) -> dict[str, Any]:
    """What the chief has written down at its end, whose numbers must be those of one device."""
    told: dict[str, Any] = json.loads((tmp_path / "checkpoints" / "result.json").read_text())
    assert told["step"] == training.STEPS
    assert told["weights"] == pytest.approx(training.expected(), abs=1e-6)
    return told


def test_fixed_workers(local_ray: Any, tmp_path: Path) -> None:
    from tfstyle_dist.integrations.ray import TfdConfig

    fit(TfdConfig(timeout_seconds=70), tmp_path)
    told = check(tmp_path)
    assert (told["replicas"], told["timeout"]) == (2, 70)


def test_under_rays_own_config(local_ray: Any, tmp_path: Path) -> None:
    """Ray has made the process group: the strategy adopts it, its limit too, and leaves it as it is."""
    from ray.train.torch import TorchConfig

    fit(TorchConfig(backend="gloo", timeout_s=77), tmp_path, adopted=True)
    told = check(tmp_path)
    assert (told["replicas"], told["timeout"], told["initialised"]) == (2, 77, True)


def test_a_range_of_workers(local_ray: Any, tmp_path: Path) -> None:
    from tfstyle_dist.integrations.ray import TfdConfig

    fit(TfdConfig(), tmp_path, workers=(1, 2))
    check(tmp_path)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_killed_worker_comes_back(local_ray: Any, tmp_path: Path, adopted: bool) -> None:
    """Ray starts all workers again, and they go on from the newest checkpoint; not one number differs."""
    from ray.train.torch import TorchConfig

    from tfstyle_dist.integrations.ray import TfdConfig

    config = TorchConfig(backend="gloo") if adopted else TfdConfig()
    fit(config, tmp_path, failures=1, kill=3)
    check(tmp_path)
    assert (tmp_path / "checkpoints" / "died").exists()


def test_the_error_of_a_worker_is_what_fit_raises(local_ray: Any, tmp_path: Path) -> None:
    from ray.train import TrainingFailedError

    from tfstyle_dist.integrations.ray import TfdConfig

    with pytest.raises(TrainingFailedError, match="worker 1 has had enough"):
        fit(TfdConfig(timeout_seconds=20), tmp_path, function=training.refuse)


def test_a_limit_that_is_none_is_refused() -> None:
    from tfstyle_dist.integrations.ray import TfdConfig

    with pytest.raises(ValueError, match=r"TfdConfig\(timeout_seconds=0\): write a number of seconds above 0"):
        TfdConfig(timeout_seconds=0)
