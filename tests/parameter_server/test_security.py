"""Keys: who may use a server, and where it listens without them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import tfstyle_dist as td
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.parameter_server import keys
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.key_pair import Keys

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    assert keys.main([str(path)]) == 0
    return path


def test_a_key_file_is_private_and_is_not_overwritten(key_file: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    before = key_file.read_text()
    assert keys.main([str(key_file)]) == 1
    assert key_file.read_text() == before
    assert keys.main([str(key_file.parent / "absent" / "cluster.key")]) == 1
    key_file.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        Keys.load(key_file)
    key_file.chmod(0o600)
    key_file.write_text("{}")
    with pytest.raises(ValueError, match="no key file"):
        Keys.load(key_file)


def test_training_with_keys(cluster: Any, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(key_file))
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    c = cluster(workers=1, ps=1, env={"TFSTYLE_PS_KEYS": str(key_file), "TFSTYLE_SHARED_MEMORY": "0"})
    assert c.add_three_times(500_000).eq(3).all()


@pytest.mark.parametrize("wrong", ["other keys", "no keys"])
def test_clients_without_the_clusters_keys_are_refused(
    cluster: Any, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    c = cluster(workers=1, ps=1, env={"TFSTYLE_PS_KEYS": str(key_file)}, coordinator=False)
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "5")
    if wrong == "other keys":
        keys.main([str(tmp_path / "other.key")])
        monkeypatch.setenv("TFSTYLE_PS_KEYS", str(tmp_path / "other.key"))
    with pytest.raises((UnavailableError, TimeoutError), match="TFSTYLE_PS_KEYS"):
        c.make_coordinator()
    c.strategy.close()
    # The cluster still works for those who have them.
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(key_file))
    monkeypatch.delenv("TFSTYLE_TIMEOUT_SECONDS")
    c.make_coordinator()
    assert c.coordinator.schedule(max, args=(1, 2)).get(timeout=30) == 2


def test_nobody_is_admitted_while_nobody_looks_at_keys(tmp_path: Path) -> None:
    """A client that knows the server's public key, with a key of its own, when the allow-list's thread is gone."""
    for name in ("cluster", "other"):
        keys.main([str(tmp_path / name)])
    cluster, other = (Keys.load(tmp_path / name) for name in ("cluster", "other"))
    server, client = zeromq_sockets.Context(cluster), zeromq_sockets.Context(None)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    listening = server.listen(address)
    asking = client.context.socket(zeromq_sockets.zmq.DEALER)
    try:
        server._authenticators.pop().stop()
        asking.linger = 0
        asking.curve_publickey, asking.curve_secretkey = other.public, other.secret
        asking.curve_serverkey = cluster.public
        asking.connect(f"tcp://{address}")
        asking.send(b"let me in")
        assert not listening.poll(1000)
    finally:
        asking.close()
        listening.close()
        client.close()
        server.close()


def test_without_keys_only_loopback_is_served() -> None:
    with pytest.raises(PermissionError, match="TFSTYLE_PS_KEYS"):
        td.Server({"worker": ["0.0.0.0:0"]})
