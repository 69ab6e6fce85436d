"""The launch files: those that can run on one machine are run, with processes of other addresses as hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster_processes import clean_environment

from tfstyle_dist.core import network

pytestmark = pytest.mark.timeout(180)
CONFIGS = Path(__file__).resolve().parents[2] / "torchrun_configs"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

SUM = """
import os, sys
import torch
import tfstyle_dist as td

with td.MultiWorkerMirroredStrategy() as strategy:
    total = strategy.run(lambda: td.get_replica_context().all_reduce("SUM", torch.ones(1)))
    rank = strategy.worker.group.rank
    if "--fail-once" in sys.argv and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os._exit(9)
    again = strategy.run(lambda: td.get_replica_context().all_reduce("SUM", torch.ones(1)))
    print(f"worker {rank} sum {total.tolist()} {again.tolist()} {type(strategy.cluster_resolver).__name__}", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(SUM)
    return path


@pytest.fixture
def run() -> Iterator[Any]:
    """Starts launch files; all are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, arguments: Sequence[object], **environment: object) -> subprocess.Popen[str]:
        settings = {key: str(value) for key, value in environment.items()}
        started.append(
            subprocess.Popen(
                ["bash", str(CONFIGS / name), *map(str, arguments)],
                env=clean_environment(TORCHRUN=TORCHRUN, PYTHON=sys.executable, **settings),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.terminate()  # torchrun ends its workers
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def outputs(*processes: subprocess.Popen[str]) -> str:
    """What they all print; they must succeed."""
    texts = [process.communicate(timeout=120)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
    return "".join(texts)


@pytest.mark.slow
def test_single_host_cpu(run: Any, program: Path) -> None:
    said = outputs(run("single_host_cpu.sh", [program], WORKERS=2))
    for rank in range(2):
        assert f"worker {rank} sum [2.0] [2.0] TorchrunClusterResolver" in said


@pytest.mark.slow
def test_two_hosts_static(run: Any, program: Path) -> None:
    (port,) = network.free_ports(1)
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said = outputs(*(run("two_hosts_static.sh", [program], NODE_RANK=rank, **settings) for rank in range(2)))
    for rank in range(2):
        assert f"worker {rank} sum [2.0] [2.0]" in said


@pytest.mark.slow
def test_two_hosts_elastic_start_again_after_a_failure(run: Any, program: Path) -> None:
    (port,) = network.free_ports(1)
    settings = {"RDZV_HOST": "localhost", "RDZV_PORT": port, "RDZV_ID": uuid.uuid4().hex, "MIN_NODES": 2}
    hosts = [run("two_hosts_elastic.sh", [program, "--fail-once"], **settings) for _ in range(2)]
    said = outputs(*hosts)
    assert len(re.findall(r"worker \d sum \[2.0\] \[2.0\]", said)) == 2, said


def test_ps_cluster(run: Any, tmp_path: Path) -> None:
    program = tmp_path / "roles.py"
    program.write_text(
        "import pathlib, time\n"
        "from tfstyle_dist.cluster_resolver import TFConfigClusterResolver\n"
        "resolver = TFConfigClusterResolver()\n"
        "print(resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks('ps'), flush=True)\n"
        "folder = pathlib.Path(__file__).parent\n"
        "(folder / f'here-{resolver.task_type}-{resolver.task_id}').touch()\n"
        "while resolver.task_type != 'chief' or len(list(folder.glob('here-*'))) < 4:\n"
        "    time.sleep(0.05)\n"
    )
    said = outputs(run("ps_cluster.sh", [program], WORKERS=1, PS=2, GRACE=1))
    for task in ("chief 0", "worker 0", "ps 0", "ps 1"):
        assert f"[{task}] {task} 2" in said, said


@pytest.mark.slow
def test_slurm(run: Any, program: Path, tmp_path: Path) -> None:
    """``srun`` is played by a script that sets what SLURM sets for a step of two tasks on one node."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/usr/bin/env bash\n"
        '[ "$1" = --kill-on-bad-exit=1 ] && shift\n'
        "export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost\n"
        'SLURM_PROCID=1 "$@" & SLURM_PROCID=0 "$@"; code=$?; wait $! && exit $code\n'
    )
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = 1000 + os.getpid() % 100
    said = outputs(run("slurm.sbatch", [program], PATH=path, SLURM_JOB_ID=job, SLURM_SUBMIT_DIR=tmp_path))
    for rank in range(2):
        assert f"worker {rank} sum [2.0] [2.0] SlurmClusterResolver" in said


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_files_are_commented_and_correct(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= (140 if path.name == "kubernetes_ps.yaml" else 70)  # three kinds of tasks
    assert sum(line.lstrip().startswith("#") for line in lines) >= 6
    assert f"torchrun_configs/{path.name}" in text, "say how it is started"
    if path.suffix == ".yaml":
        yaml = pytest.importorskip("yaml")
        documents = list(yaml.safe_load_all(text))
        assert all({"apiVersion", "kind", "metadata", "spec"} <= document.keys() for document in documents)
    elif path.name != "Dockerfile":
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


def test_the_job_has_one_pod_for_each_worker() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CONFIGS / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(env["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert env["MASTER_ADDR"] == f"{name}-0.{subdomain}"
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["selector"] == {"job-name": name}
    assert int(env["MASTER_PORT"]) == service["spec"]["ports"][0]["port"]
