"""Addresses of tasks that nobody could listen at."""

from __future__ import annotations

import pytest

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.experimental import rpc

WRONG = ["localhost", "localhost:", "localhost:abc", "localhost:70000", ":2222", "127.0.0.1:-1"]


@pytest.mark.parametrize("address", WRONG)
def test_an_address_without_a_port_is_explained(address: str) -> None:
    """Not as a lack of keys, nor as an address in use; by the server, the strategy and both sides of rpc."""
    with pytest.raises(InvalidArgumentError, match="'host:port'"):
        td.Server({"local": [address]}, job_name="local", task_index=0)
    for job in ("worker", "ps"):
        cluster = {"worker": ["localhost:1"], "ps": ["localhost:2"]} | {job: [address]}
        resolver = td.cluster_resolver.SimpleClusterResolver(td.cluster_resolver.ClusterSpec(cluster))
        with pytest.raises(InvalidArgumentError, match="has no port"):
            td.ParameterServerStrategy(resolver)
    with pytest.raises(InvalidArgumentError, match="has no port"):
        rpc.Server.create("grpc", address).start()
    with pytest.raises(InvalidArgumentError, match="has no port"):
        rpc.Client.create("grpc", address, timeout_in_ms=100)
