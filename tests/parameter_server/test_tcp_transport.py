"""Tensors over plain TCP: whole, refused without a token, and only where there are no keys."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core import env
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.parameter_server import keys
from tfstyle_dist.parameter_server.protocol.header import Header, Kind, pack_json, pack_message
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation
from tfstyle_dist.parameter_server.protocol.work import NO_WORK, Work

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SIZES = (1, 16_390, 300_001, 3_000_000)
FAR = {"TFSTYLE_SHARED_MEMORY": "0"}


def far_cluster(cluster: Any, monkeypatch: pytest.MonkeyPatch, tcp: str, **options: Any) -> Any:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    monkeypatch.setenv("TFSTYLE_PS_TCP", tcp)
    return cluster(env={**FAR, "TFSTYLE_PS_TCP": tcp, **options.pop("env", {})}, **options)


@pytest.mark.parametrize("tcp", ["1", "0"])
def test_values_come_and_go_whole(cluster: Any, monkeypatch: pytest.MonkeyPatch, tcp: str) -> None:
    c = far_cluster(cluster, monkeypatch, tcp, workers=3, ps=1)
    with c.strategy.scope():
        variables = [td.Variable(torch.zeros(size)) for size in SIZES]

    def add() -> bool:
        values = [v.value() for v in variables]
        for v in variables:
            v.assign_add(torch.ones(v.shape))
        return all(bool(value.eq(value[0]).all()) for value in values)

    results = [c.coordinator.schedule(add) for _ in range(24)]
    c.coordinator.join(timeout=50)
    assert all(r.fetch() for r in results)
    assert all(v.value().eq(24).all() for v in variables)
    assert c.strategy.servers.links[0].transport_name == ("TCP" if tcp == "1" else "ZeroMQ")


def test_a_request_that_does_not_fit_is_refused_and_the_next_one_served(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = far_cluster(cluster, monkeypatch, "1", workers=1, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(100_000))
    assert v.value().eq(0).all()
    link, number = c.strategy.servers.links[0], v._tfstyle_record.shards[0].number
    wrong = torch.ones(500_000)
    link.batch(NO_WORK, [Operation(Op.ADD, 0, number, 0, 0, wrong.nbytes)], [wrong], None)
    with pytest.raises(InvalidArgumentError, match="needs 400000 bytes, but the message carries 2000000"):
        link.finish()
    v.assign_add(torch.ones(100_000))
    assert v.value().eq(1).all()


def send_slowly(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.01)


def test_nobody_enters_without_a_token(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = far_cluster(cluster, monkeypatch, "1", workers=1, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(100_000))
    assert v.value().eq(0).all()
    told = c.strategy.servers.links[0].call({"method": "listen", "transport": "tcp"})
    address = ("127.0.0.1", told["port"])
    false_token = pack_message(Header(Kind.HANDSHAKE, 0, meta_bytes=16), bytes(16))
    batch = pack_message(Header(Kind.BATCH, 1, data_bytes=1 << 40), b"")
    for sent in (b"x" * 5000, false_token, batch, bytes.fromhex(told["token"]) * 9, b"\0" * 60):
        with socket.create_connection(address, 5) as stranger:
            stranger.sendall(sent)
            with contextlib.suppress(ConnectionResetError):  # it was not all read
                assert stranger.recv(10) == b""  # closed, nothing told
    with socket.create_connection(address, 5) as stranger:
        stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with pytest.raises(ConnectionError):  # before it has told who it is
            send_slowly(stranger, Header(Kind.HANDSHAKE, 0, meta_bytes=1 << 20).pack() + bytes(2000))
    assert v.value().eq(0).all()
    assert c.statistics()[0]["clients"] <= 2


@pytest.mark.parametrize("servers", ["always", "1"])
def test_with_keys_tensors_come_by_tcp_if_both_ends_say_so(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servers: str
) -> None:
    keys.main([str(tmp_path / "cluster.key")])
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(tmp_path / "cluster.key"))
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    environment = {**FAR, "TFSTYLE_PS_KEYS": str(tmp_path / "cluster.key"), "TFSTYLE_PS_TCP": servers}
    c = cluster(workers=1, ps=1, env=environment, coordinator=False)
    monkeypatch.setenv("TFSTYLE_PS_TCP", "always")
    c.make_coordinator()
    assert c.add_three_times(300_000).eq(3).all()
    assert c.strategy.servers.links[0].transport_name == ("TCP" if servers == "always" else "ZeroMQ")


def test_what_comes_in_the_clear_cancels_no_functions(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With keys only the coordinator's encrypted link says which functions are finished."""
    keys.main([str(tmp_path / "cluster.key")])
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(tmp_path / "cluster.key"))
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    c = far_cluster(
        cluster, monkeypatch, "always", workers=1, ps=1, env={"TFSTYLE_PS_KEYS": str(tmp_path / "cluster.key")}
    )
    with c.strategy.scope():
        value = td.Variable(torch.zeros(4))
    link = c.strategy.servers.links[0]
    assert link.transport_name == "TCP"
    forged = Work(1 << 40, 1, 1 << 40)  # everything before is finished
    link.post(forged, [Operation(Op.ADD, 0, value._tfstyle_record.shards[0].number, 0, 0, 16)], [torch.ones(4)])
    link.finish()
    assert c.add_three_times(10).eq(3).all()


def test_nothing_but_tensors_comes_by_tcp(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = far_cluster(cluster, monkeypatch, "1", workers=1, ps=1)
    with c.strategy.scope():
        td.Variable(torch.zeros(100_000))
    body = pack_json({"method": "statistics"})
    stream = c.strategy.servers.links[0].transport.socket
    stream.send([pack_message(Header(Kind.CALL, 7, meta_bytes=len(body)), body)], None, lambda: None)
    answer = stream.receive(timedelta(seconds=10), lambda: None)[0]
    assert Header.unpack(answer).kind is Kind.ERROR
    assert b"tensors alone come this way" in answer


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_PS_TCP", "yes")
    with pytest.raises(ValueError, match=r"TFSTYLE_PS_TCP='yes': write 0 .* 1 .* always"):
        env.parameter_server_tcp(with_keys=True)
