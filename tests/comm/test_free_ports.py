"""Ports that are looked up now and used later."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tfstyle_dist.core import network


def test_the_kernel_gives_them_to_nobody_by_chance() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = network.free_ports(20)
    assert len(set(found)) == 20
    if first > 11_000:
        assert max(found) < first
    for port in found:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_used_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = network.free_ports(1)
    network._forget_marks()
    monkeypatch.setattr(network, "_FIRST_PORT", port)
    monkeypatch.setattr(network, "_FEW_PORTS", 1)
    monkeypatch.setattr(network, "_first_ephemeral_port", lambda: port + 1)  # there is only this one
    assert network.free_ports(1) == [port]
    assert network.free_ports(1) != [port], "it was found, and may not be used yet"
    program = "from tfstyle_dist.core import network; network._mark({})"
    assert subprocess.run([sys.executable, "-c", program.format(port)], capture_output=True).returncode == 1
    network._forget_marks()
    assert subprocess.run([sys.executable, "-c", program.format(port)]).returncode == 0
    with socket.socket() as one:
        one.bind(("127.0.0.1", port))
        (other,) = network.free_ports(1)
    assert other not in (0, port)


def test_a_host_that_leaves_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    for place in (tmp_path / "range", tmp_path / "nothing"):
        monkeypatch.setattr(network, "_EPHEMERAL", place)
        assert len(set(network.free_ports(5))) == 5
