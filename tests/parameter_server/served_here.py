"""A parameter server in the process of a test, which can stop it anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from until import wait_until

from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.server.loop import ParameterServer

THREAD = "the server of a test"


@contextmanager
def served_here(cluster: Any) -> Iterator[tuple[Any, ParameterServer]]:
    """Runs the only server of a cluster, of which nothing was started, and makes the coordinator."""
    context = zeromq_sockets.Context(None)
    server = ParameterServer(context, cluster.spec["ps"][0], "/job:ps/task:0", 60.0)
    thread = threading.Thread(target=server.run, name=THREAD)
    thread.start()
    try:
        cluster.make_coordinator()
        yield cluster, server
    finally:
        cluster.strategy.close()
        server.end()  # its client may have been refused, and could not say goodbye
        thread.join(20)
        context.close()
    # A connection that has ended by itself is not waited for; its thread is about to end.
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tfstyle-ps")])
