"""Elastic jobs under Ray Train: lost workers are started again one by one, and no number differs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_elastic

import tfstyle_dist as tfd
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.testing.runner import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),  # Ray warns of its own code
]
STEPS = 8
ELASTIC = Path(__file__).parents[2] / "elastic"
EXACT = ("weights", "buffers", "seen")


def fit(tmp_path: Path, *faults: str, function: Any = ray_elastic.train, failures: int = 1, **environment: str) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from tfstyle_dist.integrations.ray import TfdConfig

    folder = tmp_path / "workers"
    folder.mkdir()
    config = {"folder": str(folder), "faults": faults, "steps": STEPS, "environment": environment}
    return TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=TfdConfig(timeout_seconds=200, elastic=True),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(
            storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()


def lives(tmp_path: Path) -> list[int]:
    """How often each worker was started."""
    return [len(list((tmp_path / "workers").glob(f"worker{rank}-*"))) for rank in range(3)]


def result_of(tmp_path: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "workers" / f"result{rank}").read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """What one worker prints that holds all replicas, without Ray."""
    cluster = {"cluster": {"worker": [f"127.0.0.1:{free_ports(1)[0]}"]}, "task": {"type": "worker", "index": 0}}
    environment = {"TF_CONFIG": json.dumps(cluster), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_script([ELASTIC / "elastic_train.py", "mlp", str(STEPS)], env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().removeprefix("result "))
    return found


def assert_same(tmp_path: Path, undisturbed: dict[str, Any], ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    for rank in ranks:
        found = result_of(tmp_path, rank)
        assert {name: found[name] for name in EXACT} == {name: undisturbed[name] for name in EXACT}, rank
        assert found["losses"] == undisturbed["losses"][found["first"] :], rank


def test_killed_workers_are_started_again_alone_and_join(
    local_ray: Any, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    result = fit(tmp_path, "1:2:backward", "0:4:step", failures=2, REJOIN="3", WORKERS="3")
    assert_same(tmp_path, undisturbed)
    assert lives(tmp_path) == [2, 2, 1]
    assert [result_of(tmp_path, rank)["joined"] for rank in range(3)] == [True, True, False]
    assert result.return_value == "came to the end"


def test_a_worker_that_raises_is_started_again(local_ray: Any, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    fit(tmp_path, "1:2:backward", function=ray_elastic.raise_once, REJOIN="3", WORKERS="3")
    assert_same(tmp_path, undisturbed)
    assert lives(tmp_path) == [1, 2, 1]
    assert result_of(tmp_path, 1)["joined"]


def test_a_worker_that_is_lost_at_the_end_comes_too_late(
    local_ray: Any, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """The others are done, and it has nobody to wait for: that is no failure."""
    fit(tmp_path, f"2:{STEPS - 1}:end")
    assert_same(tmp_path, undisturbed, (0, 1))
    assert lives(tmp_path) == [1, 1, 2]
    assert not (tmp_path / "workers" / "result2").exists()


def test_more_losses_than_ray_allows_end_the_job(local_ray: Any, tmp_path: Path) -> None:
    from ray.train import TrainingFailedError

    with pytest.raises(TrainingFailedError):
        fit(tmp_path, "1:2:backward", failures=0, REJOIN="3", WORKERS="3")
    assert lives(tmp_path) == [1, 1, 1]


def test_a_worker_on_another_host_is_refused() -> None:
    """The others know its old address."""
    from tfstyle_dist.integrations.ray.elastic import TfdElasticBackend

    backend = TfdElasticBackend()
    backend._addresses = ["10.0.0.1:4000", "10.0.0.2:4000"]
    with pytest.raises(tfd.errors.UnavailableError, match=r"worker 1 again on 10\.0\.0\.3, .* know it at 10\.0\.0\.2"):
        backend._check_hosts([(1, 2, "10.0.0.3")])
    backend._check_hosts([(1, 2, "10.0.0.2")])


def test_a_ray_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfstyle_dist.integrations.ray import TfdConfig, elastic

    monkeypatch.setattr(elastic, "Backend", SimpleNamespace())
    with pytest.raises(NotImplementedError, match="needs a Ray Train that starts a lost worker alone again"):
        TfdConfig(elastic=True)
