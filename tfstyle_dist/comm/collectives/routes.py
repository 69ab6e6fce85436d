"""Which way a sum over the workers takes: the choice, its model, and what it says when asked.

The seconds of the model were measured with Gloo over the loopback of one host of two cores; only their order decides.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tfstyle_dist.core.enums import AggregationMethod

_ROUND_SECONDS = 250e-6  # a message sent and one received
_SECONDS_PER_BYTE = 2e-9  # received through a socket
_GATHERED_MOST_BYTES = 8 * 1024 * 1024  # of all contributions together: above, fresh memory costs more than messages
_MEMORY_SECONDS, _MEMORY_SECONDS_PER_BYTE = 30e-6, 0.3e-9


class Route(enum.Enum):
    """The ways a sum can take; the value says what happens.

    All but ``OWN`` give the bits of their ``AggregationMethod``.
    """

    MEMORY = "through memory that the workers share; each sums a slice of all contributions"
    HOSTS = "each host in shared memory, then halving and doubling between the hosts"
    GATHER = "all contributions to every worker, each sums them"
    SLICES = "a slice of all contributions to every worker, summed there once, and gathered"
    HALVING = "recursive halving and doubling between the workers"
    OWN = "the library's own all-reduce"


@dataclass(frozen=True)
class Conditions:
    """Where a sum is made.

    Attributes:
        workers: how many there are.
        hosts: on how many hosts.
        aligned: whether each host's sum is a branch of the tree over all workers.
        memory: whether the workers of each host share memory for these values.
        accelerator: whether the values are on a GPU.
        summable: whether the package can add them itself.
    """

    workers: int
    hosts: int
    aligned: bool
    memory: bool
    accelerator: bool
    summable: bool


def routes_for(method: int, given: Conditions) -> list[Route]:
    """The routes that give what ``method`` promises, the preferred one of equal seconds first."""
    one_host = given.memory and given.hosts == 1
    between_hosts = given.memory and given.hosts > 1 and given.aligned and given.workers > given.hosts
    if AggregationMethod.is_default(method):
        if given.accelerator or not given.summable:
            return [Route.OWN]
        return [Route.MEMORY] if one_host else [Route.HOSTS] if between_hosts else [Route.OWN]
    if one_host:
        return [Route.MEMORY]
    if method == AggregationMethod.EXPERIMENTAL_TREE:
        return [Route.GATHER, Route.HOSTS if between_hosts else Route.HALVING]
    return [Route.GATHER, Route.SLICES]  # no partial sum has ADD_N's order, so all contributions travel


def seconds_of(route: Route, nbytes: int, given: Conditions) -> float:
    """The modelled time of one sum of ``nbytes``."""
    workers, hosts = given.workers, given.hosts
    memory = _MEMORY_SECONDS + nbytes * _MEMORY_SECONDS_PER_BYTE
    if route is Route.MEMORY:
        return memory
    if route is Route.HOSTS:
        rounds, received = 2 * (hosts - 1).bit_length(), 2 * nbytes * (hosts - 1) / hosts
        return memory + rounds * _ROUND_SECONDS + received * _SECONDS_PER_BYTE
    if route is Route.GATHER:
        if workers * nbytes > _GATHERED_MOST_BYTES:
            return math.inf
        return _ROUND_SECONDS + (workers - 1) * nbytes * _SECONDS_PER_BYTE
    rounds = {Route.SLICES: 2, Route.HALVING: 2 * (workers - 1).bit_length()}.get(route, 2 * (workers - 1))
    return rounds * _ROUND_SECONDS + 2 * nbytes * (workers - 1) / workers * _SECONDS_PER_BYTE


def choose(method: int, nbytes: int, given: Conditions) -> Route:
    """The cheapest route that gives what ``method`` promises; a function of its arguments alone."""
    routes = routes_for(method, given)
    return routes[0] if len(routes) == 1 else min(routes, key=lambda route: seconds_of(route, nbytes, given))


def explain(method: int, nbytes: int, given: Conditions) -> str:
    """One line on the choice for ``nbytes`` and why."""
    chosen = choose(method, nbytes, given)
    order = _NAMES[AggregationMethod.EXPERIMENTAL_TREE if chosen is Route.HOSTS else method]
    name = "DEFAULT" if AggregationMethod.is_default(method) else order
    bits = "added in the library's order" if chosen is Route.OWN else f"added as {order}"
    times = ", ".join(f"{r.name} {seconds_of(r, nbytes, given) * 1e3:.3g} ms" for r in routes_for(method, given))
    return (
        f"{name} of {nbytes} bytes over {given.workers} workers on {given.hosts} host(s): {chosen.name}, "
        f"{chosen.value}; {bits}; modelled: {times}"
    )


_NAMES = {
    AggregationMethod.ADD_N: "ADD_N",
    AggregationMethod.EXPERIMENTAL_TREE: "EXPERIMENTAL_TREE",
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: "EXPERIMENTAL_ACCUMULATE_N",
}
