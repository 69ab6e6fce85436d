"""Functions of the coordinator that servers call with their table: at once, or as jobs between requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.parameter_server.client.push import Servers
from tfstyle_dist.parameter_server.protocol import pickling

_POLL_SECONDS = 0.01
_IN_A_CALL = 256


def call(servers: Servers, server: int, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What ``function(table, *args)`` gives on a server: plain values."""
    return servers.call(server, {"method": "apply"}, pickling.dumps((function, args)))


def start(servers: Servers, server: int, function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Has a server begin with the steps of ``function(table, *args)``; what ``wait`` takes."""
    return server, int(servers.call(server, {"method": "job"}, pickling.dumps((function, args)))["number"])


def wait(servers: Servers, jobs: Sequence[tuple[int, int]]) -> None:
    """Waits for all of some jobs, and raises the first one's error."""
    first: Exception | None = None
    for server, number in jobs:
        try:
            while not (told := servers.call(server, {"method": "outcome", "number": number}))["ended"]:
                if not told["known"]:
                    raise UnavailableError(f"{servers.links[server].name} was started again meanwhile.")
                time.sleep(_POLL_SECONDS)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def in_batches(entries: list[Any]) -> list[list[Any]]:
    """As many as go into one call."""
    iterator = iter(entries)
    return list(iter(lambda: list(itertools.islice(iterator, _IN_A_CALL)), []))
