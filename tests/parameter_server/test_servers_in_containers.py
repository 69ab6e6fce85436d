"""Servers in containers: what two processes share, and what they must not take for shared."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from containers import CONTAINER, beside, needs_containers

from tfstyle_dist.core.network import free_ports
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.operations import dtype_number, tensor_bytes

pytestmark = pytest.mark.timeout(90)
PROGRAM = Path(__file__).with_name("server_and_reader.py")
SIZE = 1 << 18


@pytest.fixture
def in_containers() -> Iterator[tuple[dict[str, list[str]], list[subprocess.Popen[str]]]]:
    """Two servers, each process 1 of a container of its own."""
    cluster = {"ps": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    servers = [
        subprocess.Popen(
            [*CONTAINER, sys.executable, str(PROGRAM), json.dumps(cluster), str(index)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        yield cluster, servers
    finally:
        for server in servers:
            server.kill()
            server.communicate(timeout=20)


@needs_containers
def test_a_worker_reads_the_server_that_it_asked(in_containers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers have process id 1 and files of the same numbers: /proc/1 is the one of the reader's container."""
    cluster, servers = in_containers
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    context, session = zeromq_sockets.Context(None), uuid.uuid4().hex
    links = []
    for index, address in enumerate(cluster["ps"]):
        handshake = {"role": "coordinator", "task": "chief", "session": session}
        links.append(ServerLink(context, address, f"/job:ps/task:{index}", handshake, timedelta(seconds=20)))
        value = torch.full((SIZE,), 100.0 * (index + 1))
        variable = {"number": 1, "name": "v", "shape": [SIZE], "dtype": dtype_number(value.dtype)}
        links[-1].call({"method": "create", "variables": [variable]}, [tensor_bytes(value)])
    monkeypatch.delenv("TFSTYLE_SHARED_MEMORY")
    for here in (0, 1):
        command = [*beside(servers[here]), sys.executable, str(PROGRAM), json.dumps(cluster), session]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        for index, seen in enumerate(json.loads(done.stdout)):
            before = 100.0 * (index + 1) + here
            assert seen[:4] == [before, before, before + 1, before + 1], (here, index, seen)
            assert seen[4].startswith("shared memory") == (index == here), (here, index, seen)
    for link in links:
        link.close()
    context.close()
