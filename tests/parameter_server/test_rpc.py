"""``experimental.rpc``: functions of another process, with and without keys."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tfstyle_dist.core.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError, UnavailableError
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.experimental import rpc
from tfstyle_dist.parameter_server import keys

pytestmark = pytest.mark.timeout(60)


def add(a: Any, b: Any) -> Any:
    return a + b


def fails(text: str) -> None:
    raise KeyError(text)


def serve(address: str, ready: Any) -> None:
    server = rpc.Server.create("grpc", address)
    server.register("add", add)
    server.register("fails", fails)
    server.register("sleep", time.sleep)
    server.register("lock", threading.Lock)
    server.register("pid", os.getpid)
    server.start()
    ready.set()
    threading.Event().wait()


@pytest.fixture
def address(no_leaks: None) -> Iterator[str]:
    """A server in another process."""
    context = multiprocessing.get_context("fork")
    where, ready = f"localhost:{free_ports(1)[0]}", context.Event()
    process = context.Process(target=serve, args=(where, ready), daemon=True)
    process.start()
    assert ready.wait(20)
    yield where
    process.kill()
    process.join()


@pytest.fixture
def key_file(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cluster.key"
    assert keys.main([str(path)]) == 0
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(path))
    return path


def test_calls(address: str) -> None:
    client = rpc.Client.create("grpc", address, name="test")
    result = client.call("add", [torch.ones(300_000), 2.0])
    assert result.is_ok()
    assert result.get_error() == (0, "")
    assert torch.equal(result.get_value(), torch.full((300_000,), 3.0))
    assert client.add("a", b"b"[:0].decode() + "c").get_value() == "ac"  # type: ignore[attr-defined]
    assert client.call("pid").get_value() != os.getpid()
    # Several at once, asked for in another order.
    slow, quick = client.call("sleep", [0.3]), client.call("add", [1, 2])
    assert quick.get_value() == 3
    assert slow.get_value() is None
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.call("add", [1, 2])


def test_errors(address: str) -> None:
    client = rpc.Client.create("grpc", address, timeout_in_ms=5000)
    wrong = client.call("fails", ["on purpose"])
    assert not wrong.is_ok()
    assert wrong.get_error()[0] == 2
    assert "KeyError" in wrong.get_error()[1]
    with pytest.raises(RuntimeError, match="on purpose"):
        wrong.get_value()
    assert client.call("no such").get_error()[0] == 5
    with pytest.raises(NotFoundError, match="'add'"):
        client.call("no such").get_value()
    assert "cannot be sent" in client.call("lock").get_error()[1]
    with pytest.raises(TypeError, match="cannot be sent"):
        client.call("add", [threading.Lock(), 1])
    with pytest.raises(DeadlineExceededError, match="within"):
        client.call("sleep", [5.0], timeout_in_ms=100).get_value()
    pid = client.call("pid").get_value()
    pending = client.call("sleep", [30.0])
    os.kill(pid, signal.SIGKILL)
    assert pending.get_error()[0] == 14
    client.close()
    with pytest.raises(DeadlineExceededError, match="Is it running"):
        rpc.Client.create("grpc", address, timeout_in_ms=200)


def test_keys(key_file: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rpc.Client.create("grpc", address)
    assert client.call("add", [1, 2]).get_value() == 3
    client.close()
    assert keys.main([str(tmp_path / "other.key")]) == 0
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(tmp_path / "other.key"))
    with pytest.raises((UnavailableError, DeadlineExceededError), match="TFSTYLE_PS_KEYS"):
        rpc.Client.create("grpc", address, timeout_in_ms=3000)
    monkeypatch.delenv("TFSTYLE_PS_KEYS")
    with pytest.raises((UnavailableError, DeadlineExceededError), match="TFSTYLE_PS_KEYS"):
        rpc.Client.create("grpc", address, timeout_in_ms=1000)


def test_a_server_in_this_process(no_leaks: None) -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    server = rpc.Server.create("grpc", where)
    server.register("add", add)
    with pytest.raises(InvalidArgumentError, match="registered already"):
        server.register("add", add)
    with pytest.raises(TypeError, match="takes a function"):
        server.register("one", 1)  # type: ignore[arg-type]
    server.start()
    with pytest.raises(RuntimeError, match="started already"):
        server.start()
    with pytest.raises(UnavailableError, match="Cannot listen"):
        rpc.Server.create("grpc", where).start()
    client = rpc.Client.create("grpc", where)
    assert client.call("add", [1, 2]).get_value() == 3
    client.close()
    server.stop()
    with pytest.raises(ValueError, match="grpc"):
        rpc.Server.create("http", where)
    with pytest.raises(PermissionError, match="TFSTYLE_PS_KEYS"):
        rpc.Server.create("grpc", "0.0.0.0:0").start()


def test_a_method_that_is_called_like_a_blocking_one() -> None:
    where = f"localhost:{free_ports(1)[0]}"
    server = rpc.Server.create("grpc", where)
    server.register("x", lambda: "x")
    server.register("x_blocking", lambda: "its own")
    server.start()
    client: Any = rpc.Client.create("grpc", where, timeout_in_ms=20000)
    assert client.x_blocking().get_value() == "its own"
    assert client.x().get_value() == "x"
    client.close()
    server.stop()


def test_methods_of_the_client(address: str) -> None:
    """They take a limit, wait and raise in their blocking form, and say which server they call."""
    client: Any = rpc.Client.create("grpc", address, timeout_in_ms=20000)
    assert client.add_blocking(1, 2) == 3
    assert client.add(1, 2, timeout_in_ms=20000).get_value() == 3
    assert client.add.__doc__ == f"RPC Call for add method to server {address}"
    with pytest.raises(RuntimeError, match="on purpose"):
        client.fails_blocking("on purpose")
    with pytest.raises(DeadlineExceededError, match="within"):
        client.sleep_blocking(5.0, timeout_in_ms=50)
    client.close()


@pytest.mark.parametrize("given", [[], [1], [1, 2, 3]])
def test_a_call_with_too_few_or_too_many_arguments(address: str, given: list[int]) -> None:
    """It is the caller's fault, and has the code that TensorFlow gives it."""
    client = rpc.Client.create("grpc", address, timeout_in_ms=20000)
    code, message = client.call("add", given).get_error()
    assert code == 3
    assert f"called with {len(given)} argument(s)" in message
    with pytest.raises(InvalidArgumentError, match="takes"):
        client.call("add", given).get_value()
    client.close()
