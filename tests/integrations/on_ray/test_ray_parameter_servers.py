"""Parameter server clusters whose tasks Ray places and restarts; the tests are the drivers."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from until import wait_until

import tfstyle_dist as tfd
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.testing.runner import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),  # Ray warns of its own code
]
FUNCTIONS = 60


def cluster_of(**options: Any) -> Any:
    from tfstyle_dist.integrations.ray import parameter_server_cluster

    return parameter_server_cluster(workers=2, ps=1, start_seconds=200, **options)


def count_up(coordinator: Any, variable: Any, functions: int, pause: float = 0.0) -> None:
    def add() -> None:
        time.sleep(pause)
        variable.assign_add(torch.ones(4))

    for _ in range(functions):
        coordinator.schedule(add)


def kill_one(cluster: Any, name: str) -> int:
    (task,) = (task for task in cluster.tasks() if task["name"] == name)
    os.kill(task["pid"], signal.SIGKILL)
    return int(task["pid"])


def has_come_back(cluster: Any, name: str) -> bool:
    return any(task["name"] == name and task["lives"] == 2 for task in cluster.tasks())


def test_functions_run_on_actors_with_a_key_of_their_own(local_ray: Any) -> None:
    assert "TFSTYLE_PS_KEYS" not in os.environ
    with cluster_of() as cluster:
        assert [task["name"] for task in cluster.tasks()] == [
            "/job:worker/task:0",
            "/job:worker/task:1",
            "/job:ps/task:0",
        ]
        assert "TFSTYLE_PS_KEYS" in os.environ  # the driver shows it too
        with tfd.ParameterServerStrategy(cluster) as strategy:
            coordinator = tfd.coordinator.ClusterCoordinator(strategy)
            with strategy.scope():
                variable = tfd.Variable(torch.zeros(4))
            count_up(coordinator, variable, FUNCTIONS)
            coordinator.join(timeout=60)
            assert variable.numpy().tolist() == [FUNCTIONS] * 4
            pids = {coordinator.schedule(os.getpid).fetch() for _ in range(8)}
            assert pids <= {task["pid"] for task in cluster.tasks()}
            assert os.getpid() not in pids
    assert "TFSTYLE_PS_KEYS" not in os.environ
    wait_until(lambda: local_ray.available_resources().get("CPU") == 4, 30)


def test_a_killed_worker_actor_comes_back(local_ray: Any) -> None:
    """What it had is done by the other one, exactly once; then it takes part again."""
    with cluster_of() as cluster, tfd.ParameterServerStrategy(cluster) as strategy:
        coordinator = tfd.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            variable = tfd.Variable(torch.zeros(4))
        count_up(coordinator, variable, FUNCTIONS, pause=0.02)
        before = kill_one(cluster, "/job:worker/task:1")
        coordinator.join(timeout=60)
        assert variable.numpy().tolist() == [FUNCTIONS] * 4
        wait_until(lambda: has_come_back(cluster, "/job:worker/task:1"), 60)
        after = {task["pid"] for task in cluster.tasks() if task["name"] == "/job:worker/task:1"}
        assert before not in after

        def runs_there() -> bool:
            pids = [coordinator.schedule(os.getpid) for _ in range(8)]
            coordinator.join(timeout=60)
            return bool(after & {pid.fetch() for pid in pids})

        wait_until(runs_there, 60)


def test_a_killed_server_actor_comes_back_with_its_variables(local_ray: Any, tmp_path: Path) -> None:
    options = {"snapshot_folder": tmp_path / "snapshots", "snapshot_every_write": True}
    with cluster_of() as cluster, tfd.ParameterServerStrategy(cluster, **options) as strategy:
        coordinator = tfd.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 1)
            variable = tfd.Variable(torch.zeros(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.arange(12.0).view(4, 3) / 10

        def step() -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        for number in range(20):
            coordinator.schedule(step)
            coordinator.join(timeout=60)  # in step, so that the result is that of plain training
            if number == 9:
                count_up(coordinator, variable, FUNCTIONS, pause=0.01)
                kill_one(cluster, "/job:ps/task:0")
        coordinator.join(timeout=100)
        assert has_come_back(cluster, "/job:ps/task:0")
        assert variable.numpy().tolist() == [FUNCTIONS] * 4
        torch.manual_seed(0)
        plain = torch.nn.Linear(3, 1)
        optimizer_2 = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for _ in range(20):
            optimizer_2.zero_grad()
            plain(data).square().mean().backward()
            optimizer_2.step()
        torch.testing.assert_close(model.weight.detach().clone(), plain.weight.detach())


def test_two_clusters_share_the_generated_key_until_the_last_one_ends(local_ray: Any) -> None:
    from tfstyle_dist.integrations.ray import parameter_server_cluster

    make = functools.partial(parameter_server_cluster, workers=1, ps=1, start_seconds=200)
    with make() as first, make() as second:
        first.close()
        assert Path(os.environ["TFSTYLE_PS_KEYS"]).read_bytes()
        with tfd.ParameterServerStrategy(second) as strategy:
            coordinator = tfd.coordinator.ClusterCoordinator(strategy)
            with strategy.scope():
                variable = tfd.Variable(torch.zeros(4))
            count_up(coordinator, variable, FUNCTIONS)
            coordinator.join(timeout=60)
            assert variable.numpy().tolist() == [FUNCTIONS] * 4
    assert "TFSTYLE_PS_KEYS" not in os.environ
    wait_until(lambda: local_ray.available_resources().get("CPU") == 4, 30)


def test_a_task_that_is_lost_before_it_listens_enters_again(local_ray: Any) -> None:
    from tfstyle_dist.integrations.ray.task import Directory, ParameterServerTask

    name, key = "directory-of-a-lost-task", json.dumps(zeromq_sockets.key_pair()).encode()
    directory = local_ray.remote(Directory).options(num_cpus=0, name=name).remote({"ps": 1}, key)
    options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}
    task = local_ray.remote(ParameterServerTask).options(**options).remote("ps", 0, name)
    try:
        address = local_ray.get(task.enter.remote(), timeout=200)
        (before,) = local_ray.get(directory.tasks.remote())["ps"]
        os.kill(before["pid"], signal.SIGKILL)
        local_ray.get(task.start.remote({"ps": [address], "worker": ["127.0.0.1:1"]}), timeout=200)
        (after,) = local_ray.get(directory.tasks.remote())["ps"]
        assert (after["address"], after["lives"]) == (address, 2)
        assert after["pid"] != before["pid"]
    finally:
        for actor in (task, directory):
            local_ray.kill(actor)
    wait_until(lambda: local_ray.available_resources().get("CPU") == 4, 30)


AFTER_SHUTDOWN = """
import os
import ray
import tfstyle_dist as tfd
from tfstyle_dist.integrations.ray import parameter_server_cluster

ray.init(num_cpus=2, include_dashboard=False)
cluster = parameter_server_cluster(workers=1, ps=1, start_seconds=200)
ray.shutdown()
try:
    cluster.tasks()
except tfd.errors.UnavailableError as error:
    print(error)
cluster.close()
print(ray.is_initialized(), "TFSTYLE_PS_KEYS" in os.environ)
"""


def test_a_cluster_that_is_closed_after_ray_starts_no_new_ray(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(AFTER_SHUTDOWN)
    done = run_script([program], timeout=300, env={"CUDA_VISIBLE_DEVICES": ""})
    assert "RayCluster.tasks() was called after ray.shutdown()" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "False False", done.stderr
    assert done.returncode == 0


def test_no_room_is_said(local_ray: Any) -> None:
    from tfstyle_dist.integrations.ray import parameter_server_cluster

    with pytest.raises(tfd.errors.DeadlineExceededError, match=r"Ray has no room for 2 task\(s\) of \{'CPU': 8\}"):
        parameter_server_cluster(workers=2, worker_resources={"CPU": 8}, start_seconds=2)
    wait_until(lambda: local_ray.available_resources().get("CPU") == 4, 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "needs at least one task of each kind, got workers=0"),
        ({"ps": True}, "got ps=True"),
        ({"max_restarts": -2}, "max_restarts=-2: write how often"),
        ({"start_seconds": 0}, "start_seconds=0: write a number of seconds above 0"),
    ],
)
def test_wrong_numbers(options: dict[str, Any], message: str) -> None:
    from tfstyle_dist.integrations.ray import parameter_server_cluster

    with pytest.raises(ValueError, match=message):
        parameter_server_cluster(**options)
