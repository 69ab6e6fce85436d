"""The transports beside ZeroMQ, the best one first. A new one is named in both tables here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfstyle_dist.parameter_server.transports.shared_memory import SharedMemoryTransport
from tfstyle_dist.parameter_server.transports.tcp import TcpTransport
from tfstyle_dist.parameter_server.transports.tcp_listener import TcpListener
from tfstyle_dist.parameter_server.transports.transport import Host, Link, Listener, Transport
from tfstyle_dist.parameter_server.transports.unix_listener import UnixListener
from tfstyle_dist.parameter_server.transports.zeromq import ZeroMQTransport

TRANSPORTS = (SharedMemoryTransport, TcpTransport)
LISTENERS: dict[str, Callable[[Host], Listener]] = {"shared memory": UnixListener, "tcp": TcpListener}


def open_transport(link: Link, server: dict[str, Any]) -> Transport:
    """The best transport between a client and its server.

    Args:
        link: the client's connection, which has introduced itself.
        server: what the server answered.

    Raises:
        DeadlineExceededError: the server does not answer in time.
        UnavailableError: it was lost.
    """
    for kind in TRANSPORTS:
        found = kind.open(link, server)
        if found is not None:
            return found
    return ZeroMQTransport(link)
