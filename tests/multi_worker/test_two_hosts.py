"""Two hosts train the quickstart, from TF_CONFIG and from torchrun; the weights are those of one host."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster_processes import Tasks, clean_environment, loopback_cluster

from tfstyle_dist.core import network
from tfstyle_dist.testing.runner import run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
PROGRAM = Path(__file__).with_name("train_quickstart.py")


def load(directory: Path) -> list[torch.Tensor]:
    return [torch.load(directory / f"weights-{rank}-of-2.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights of two workers of one host."""
    directory = tmp_path_factory.mktemp("one-host")
    result = run_script([PROGRAM, "mirrored", str(directory)], nproc=2, timeout=150, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr
    first, second = load(directory)
    assert torch.equal(first, second)
    return first


def check(directory: Path, expected: torch.Tensor) -> None:
    for weights in load(directory):
        assert torch.equal(weights, expected)


def test_tf_config(one_host: torch.Tensor, tmp_path: Path) -> None:
    with Tasks(PROGRAM, loopback_cluster(2), TFSTYLE_TIMEOUT_SECONDS="60") as tasks:
        tasks.start(0, 1, arguments=["multi_worker", str(tmp_path)])
        for index in range(2):
            code, output = tasks.end(index, timeout=150)
            assert code == 0, output
    check(tmp_path, one_host)


def test_torchrun_with_a_static_rendezvous(one_host: torch.Tensor, tmp_path: Path) -> None:
    (port,) = network.free_ports(1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}"]
    program = [str(PROGRAM), "multi_worker", str(tmp_path)]
    hosts = [
        subprocess.Popen(
            [*launcher, f"--node-rank={rank}", *program],
            env=clean_environment(TFSTYLE_TIMEOUT_SECONDS="60"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for host in hosts:
            output, _ = host.communicate(timeout=150)
            assert host.returncode == 0, output
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
    check(tmp_path, one_host)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces at 10.77.0.1 and 10.77.0.2, joined by a wire."""
    tag = uuid.uuid4().hex[:6]
    names = [f"tfs-{tag}-{index}" for index in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", f"wire{index}")
            ip("-n", name, "link", "set", f"wire{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_tf_config_over_a_network(one_host: torch.Tensor, tmp_path: Path, namespaces: list[str]) -> None:
    """Other host names and no common shared memory: what the workers sum goes over the wire."""
    cluster = {"worker": ["10.77.0.1:2222", "10.77.0.2:2222"]}
    with Tasks(PROGRAM, cluster, TFSTYLE_TIMEOUT_SECONDS="60") as tasks:
        for index, name in enumerate(namespaces):
            # A host name of its own, which does not even resolve: the interface follows from the address.
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
            tasks.prefix = [*command, f'hostname host{index}; exec "$@"', "sh"]
            tasks.start(index, arguments=["multi_worker", str(tmp_path)])
        for index in range(2):
            code, output = tasks.end(index, timeout=150)
            assert code == 0, output
    check(tmp_path, one_host)
