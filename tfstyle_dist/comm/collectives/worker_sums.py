"""Sums over the workers: each goes the way that ``routes`` chooses, through shared memory or over a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.comm.collectives import routes, socket_sums
from tfstyle_dist.comm.collectives.comparison import Comparison, digest_of
from tfstyle_dist.comm.collectives.flat import Add, BufferView, Flat
from tfstyle_dist.comm.collectives.routes import Route
from tfstyle_dist.comm.collectives.topology import Topology
from tfstyle_dist.comm.group import Done, Pending, SumInto
from tfstyle_dist.comm.host_memory.compiled_sums import FindSum, nothing_compiled
from tfstyle_dist.comm.host_memory.host_memory import DTYPES, HostMemory
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.logging import get_logger

# What the package can add itself; bool and the like are left to the library.
_SUMMABLE = (*DTYPES, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16)


class WorkerSums:
    """Chooses the route of each sum, once for each kind, and takes it.

    Args:
        transport: moves tensors between the workers.
        memory: sums in the memory of this host, if all hosts can.
        comparison: of the workers' calls.
        topology: which workers share a host.

    Attributes:
        sum_into: see ``WorkerGroup.use_summation``.
        find_sum: see there.
    """

    def __init__(
        self, transport: socket_sums.Transport, memory: HostMemory | None, comparison: Comparison, topology: Topology
    ) -> None:
        self._transport, self._memory, self._comparison, self._topology = transport, memory, comparison, topology
        self._routes: dict[Any, Route] = {}
        self._adders: dict[int, Add] = {}
        self.sum_into: SumInto = _left_to_right
        self.find_sum: FindSum = nothing_compiled

    def use_summation(self, sum_into: SumInto, find_sum: FindSum) -> None:
        """See ``WorkerGroup``."""
        self.sum_into, self.find_sum = sum_into, find_sum
        if self._memory is not None:
            self._memory.use_compiled(find_sum)

    def start(self, buffer: torch.Tensor, name: str, agreed: bool, method: int) -> Pending:
        """See ``WorkerGroup.all_reduce_async``."""
        route = self._route(buffer.numel(), buffer.dtype, buffer.device.type, method)
        if route is Route.MEMORY:
            self.sum_in_memory(BufferView(buffer), name, method)
            return Done()
        self._comparison.before(name, buffer, f", method {method!r}", agreed)
        if route is Route.OWN:
            return self._transport.start_all_reduce(buffer, name)
        if route is Route.GATHER:
            return socket_sums.sum_gathered(self._transport, buffer, name, self._adder(method))
        if route is Route.SLICES:
            return socket_sums.sum_slices(self._transport, buffer, name, self._adder(method))
        everybody = tuple(range(self._transport.size))
        if route is Route.HALVING:
            return socket_sums.Stages(
                None, lambda: socket_sums.sum_by_halving(self._transport, buffer, name, everybody)
            )
        column = self._topology.column(self._transport.rank)
        between = lambda part: socket_sums.sum_by_halving(self._transport, part, name, column)  # noqa: E731
        self.sum_in_memory(BufferView(buffer), name, AggregationMethod.EXPERIMENTAL_TREE, between)
        return Done()

    def shares_memory(self, dtype: torch.dtype, device_type: str) -> bool:
        """See ``WorkerGroup``."""
        return self._memory is not None and self._memory.for_all and device_type == "cpu" and dtype in DTYPES

    def sum_in_memory(
        self, values: Flat, name: str, method: int, between: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        """The sum through shared memory, made before this returns; compared on the way, at no cost.

        Args:
            values: on the CPU, of one of ``host_memory.DTYPES``.
            name: for messages.
            method: an ``AggregationMethod``.
            between: see ``SharedSums.all_reduce``.
        """
        text = f"{name} ({values.numel} x {values.dtype}, method {method!r})"
        if not self._summed(values, digest_of(text), name, method, between):
            self._comparison.raise_mismatch(text, name)

    def sum_of_variant(self, values: Flat, name: str, method: int, variant: int, call: str) -> bool:
        """See ``WorkerGroup.all_reduce_variant``; through shared memory, as ``sum_in_memory``."""
        # What is summed follows from the call and the variant.
        if self._summed(values, digest_of(call) ^ variant, name, method, None):
            return True
        self._comparison.confirm(call, name)
        return False

    def _summed(
        self, values: Flat, digest: int, name: str, method: int, between: Callable[[torch.Tensor], None] | None
    ) -> bool:
        assert self._memory is not None
        return self._memory.all_reduce(values, digest, self._adder(method), between, method, name)

    @property
    def waited(self) -> float:
        """See ``WorkerGroup``."""
        return self._memory.waited if self._memory is not None else 0.0

    def explain(self, numel: int, dtype: torch.dtype, device_type: str, method: int) -> str:
        """See ``WorkerGroup``."""
        return routes.explain(method, numel * dtype.itemsize, self._conditions(dtype, device_type))

    def _conditions(self, dtype: torch.dtype, device_type: str) -> routes.Conditions:
        topology, on_cpu = self._topology, device_type == "cpu"
        memory = self._memory is not None and on_cpu and dtype in DTYPES
        return routes.Conditions(
            self._transport.size, len(topology.hosts), topology.aligned, memory, not on_cpu, summable=dtype in _SUMMABLE
        )

    def _route(self, numel: int, dtype: torch.dtype, device_type: str, method: int) -> Route:
        key = (numel, dtype, device_type, method, AggregationMethod.is_default(method))
        route = self._routes.get(key)
        if route is None:
            given, nbytes = self._conditions(dtype, device_type), numel * dtype.itemsize
            route = self._routes[key] = routes.choose(method, nbytes, given)
            get_logger().debug("%s", routes.explain(method, nbytes, given))
        return route

    def _adder(self, method: int) -> Add:
        add = self._adders.get(method)  # DEFAULT is found as ADD_N, which has the order that it takes here
        if add is None:
            order = AggregationMethod.ADD_N if AggregationMethod.is_default(method) else method
            add = self._adders[method] = lambda parts, out: self.sum_into(parts, out, order)
        return add


def _left_to_right(parts: Sequence[torch.Tensor], out: torch.Tensor, method: int) -> None:
    """The sum before a strategy says how its sums are made; right for up to three workers."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
