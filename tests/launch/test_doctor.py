"""The doctor: what it finds, what it says to do, and its exit code."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tfstyle_dist.core import env, network
from tfstyle_dist.doctor import __main__ as doctor, cluster
from tfstyle_dist.doctor.__main__ import examine, main
from tfstyle_dist.doctor.finding import Finding, Level

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "TFSTYLE_RENDEZVOUS_FILE"):
        monkeypatch.delenv(name, raising=False)


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.PROBLEM]


def set_cluster(monkeypatch: pytest.MonkeyPatch, addresses: list[str], index: int = 0) -> None:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for area in ("versions", "devices", "backends", "shared memory", "limits", "host name", "settings", "cluster"):
        assert f" {area}: " in said
    assert said.splitlines()[-1] == "no problems"


def test_json() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tfstyle_dist.doctor", "--json"], capture_output=True, text=True, timeout=90, check=True
    )
    report = json.loads(result.stdout)
    assert report["problems"] == 0
    assert {"area", "level", "text", "advice"} == report["findings"][0].keys()


def test_a_wrong_cluster_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main([]) == 1
    assert "PROBLEM cluster: TF_CONFIG is not JSON" in capsys.readouterr().out
    set_cluster(monkeypatch, ["a:1", "a:1"])
    (found,) = problems(examine())
    assert "is given to both" in found.text
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "soon")
    assert any("TFSTYLE_TIMEOUT_SECONDS='soon'" in found.text for found in problems(examine()))


def test_every_wrong_setting_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = {
        "TFSTYLE_TIMEOUT_SECONDS": "soon", "TFSTYLE_START_TIMEOUT_SECONDS": "-1", "TFSTYLE_PS_PATIENCE_SECONDS": "x",
        "TFSTYLE_PS_TCP": "2", "TFSTYLE_LOG_LEVEL": "LOUD", "TFSTYLE_PS_KEYS": str(tmp_path / "absent"),
    }  # fmt: skip
    odd = {
        "TFSTYLE_MONITOR": "off",
        "TFSTYLE_SHARED_MEMORY": "no",
        "TFSTYLE_PS_INSECURE": "yes",
        "TFSTYLE_DEBUG": "all",
        "TFSTYLE_TIMEOUT": "30",
        "TFSTYLE_HOSTNAME": "a",
        "tfstyle_ps_keys": "k",
    }
    for name, value in {**refused, **odd}.items():
        monkeypatch.setenv(name, value)
    found = {
        level: [finding.text for finding in cluster.settings() if finding.level is level]
        for level in (Level.PROBLEM, Level.WARNING)
    }
    for level, variables in ((Level.PROBLEM, refused), (Level.WARNING, odd)):
        assert len(found[level]) == len(variables), found
        assert all(any(text.startswith(name) for text in found[level]) for name in variables), found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TFSTYLE_MONITORS", "the name of the setting is TFSTYLE_MONITOR"),
        ("TFSTYLE_TIMEOUT", "the name of the setting is TFSTYLE_TIMEOUT_SECONDS"),
        (
            "TFSTYLE_PS",
            "it may be one of TFSTYLE_PS_KEYS, TFSTYLE_PS_INSECURE, TFSTYLE_PS_TCP, TFSTYLE_PS_PATIENCE_SECONDS",
        ),
        ("TFSTYLE_", f"it may be one of {', '.join(env.SETTINGS)}"),
    ],
)
def test_a_name_that_several_settings_begin_with(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.setenv(name, "1")
    assert f"{name} has no effect; {said}" in env.without_effect()


def test_the_table_of_settings_has_all() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(TFSTYLE_[A-Z_]+)` \|", readme, re.MULTILINE)) == set(env.SETTINGS)


def test_a_task_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"clsuter": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    (found,) = problems(examine())
    assert """has a "task" and no "cluster", only the keys ['clsuter', 'task']""" in found.text


@pytest.mark.parametrize(("index", "level"), [(0, Level.PROBLEM), (1, Level.WARNING)])
def test_the_address_of_another_host(monkeypatch: pytest.MonkeyPatch, index: int, level: Level) -> None:
    """Of the task that listens it is a problem."""
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 0.2)
    ports = network.free_ports(2)
    set_cluster(monkeypatch, [f"192.0.2.{7 + i}:{port}" for i, port in enumerate(ports)], index)
    (found,) = [finding for finding in examine() if "no interface of this host" in finding.text]
    assert found.level is level
    assert f"this is worker {index} (192.0.2.{7 + index}:{ports[index]})" in found.text


def test_a_name_that_may_be_passed_on_to_this_host_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "addresses_of", lambda host: ["192.0.2.7"])
    port, other = network.free_ports(2)
    set_cluster(monkeypatch, [f"a.service:{port}", f"127.0.0.1:{other}"], 0)
    (found,) = [finding for finding in examine() if "no interface of this host" in finding.text]
    assert found.level is Level.WARNING


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_loopback_address_beside_another_host(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 0.2)
    first, second = network.free_ports(2)
    set_cluster(monkeypatch, [f"{host}:{first}", f"192.0.2.7:{second}"])
    found = [finding.text for finding in problems(examine())]
    assert f"worker 0 ({host}:{first}): every host takes this address for its own, but there is also" in found[0]


def test_a_taken_port_names_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as lower, socket.socket() as taken:
        lower.close()  # what lists the owner's descriptors is one of them, and comes first now
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        set_cluster(monkeypatch, [f"127.0.0.1:{port}", "127.0.0.1:1"])
        (found,) = problems(examine())
    assert found.area == "ports"
    assert f"port {port} is in use by pid " in found.text
    assert "choose another port" in found.advice


def test_peers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = network.free_ports(2)
    set_cluster(monkeypatch, [f"127.0.0.1:{own}", f"127.0.0.2:{other}", "no-such-host.invalid:1"])
    findings = examine()
    _, found = problems(findings)  # the first one: a loopback address beside the name of a host
    assert "no-such-host.invalid" in found.text
    assert "does not resolve" in found.text
    assert any("nothing listens there yet" in finding.text for finding in findings)
    assert any(f"port {own} is free" in finding.text for finding in findings)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    (found,) = problems(examine())
    assert found.area == "network"


def test_torchrun_with_a_loopback_master_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = network.free_ports(1)
    settings = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in {**settings, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    (found,) = problems(examine())
    assert "MASTER_ADDR=localhost, but the workers are on several hosts" in found.text


@pytest.mark.slow
def test_doctors_meet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfstyle_dist.launch", "--workers", "2", "-m", "tfstyle_dist.doctor"]
    result = subprocess.run([*command, "--meet", "60", "--json"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        lines = [line.partition("] ")[2] for line in result.stdout.splitlines() if line.startswith(f"[worker {rank}]")]
        areas = {finding["area"]: finding for finding in json.loads("\n".join(lines))["findings"]}
        assert "2 workers met" in areas["meeting"]["text"]
        assert "clocks agree to" in areas["clocks"]["text"]


def test_what_libraries_print_is_no_part_of_the_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gloo of torch 2.9 prints from C++."""

    def noisy(_: float | None) -> list[Finding]:
        os.write(1, b"[Gloo] Rank 0 is connected\n")
        return []

    monkeypatch.setattr(doctor, "examine", noisy)
    assert main(["--json"]) == 0
    output, errors = capfd.readouterr()
    assert json.loads(output) == {"problems": 0, "findings": []}
    assert errors == "[Gloo] Rank 0 is connected\n"
