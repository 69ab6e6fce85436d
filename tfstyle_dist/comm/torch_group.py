"""Worker processes joined by ``torch.distributed`` (Gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tfstyle_dist.comm import comparison, diagnosis, routes, socket_sums
from tfstyle_dist.comm.compiled import FindSum, nothing_compiled
from tfstyle_dist.comm.flat import Add, BufferView, Flat
from tfstyle_dist.comm.group import Done, Operation, Pending, SumInto, WorkerGroup, call_site
from tfstyle_dist.comm.halving import Messages
from tfstyle_dist.comm.routes import Route
from tfstyle_dist.comm.shared_lane import LaneError, SharedLane, create_segment, remove_segment
from tfstyle_dist.comm.topology import Topology
from tfstyle_dist.core import env
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.tracing import region

# What travels through shared memory; other element types are rare and take the sockets.
_LANE_TYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
# What the package can add itself; bool and the like are left to the library.
_SUMMABLE = (*_LANE_TYPES, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16)
_TIMED_OUT = ("timed out", "timeout", "Timed out", "Timeout")


class _Pending:
    """A torch work handle with the group's error handling around its wait."""

    __slots__ = ("_buffer", "_group", "_operation", "_work")

    def __init__(self, group: TorchGroup, operation: Operation, work: Any, buffer: torch.Tensor) -> None:
        self._group, self._operation, self._work, self._buffer = group, operation, work, buffer

    def wait(self) -> None:
        """Waits for the transfer; a second call returns at once."""
        if self._work is None:
            return
        try:
            with region("wait for", self._operation.name):
                self._work.wait()
        except RuntimeError as error:
            if str(error).startswith("DataLoader worker"):
                raise  # torch's signal handler speaks up in whatever runs when a loader process dies
            self._group._fail(self._operation, error)
        self._group._in_flight.discard(self._operation.sequence)
        self._work = None  # it would keep the connections open after the group is closed

    def moving(self) -> bool:
        """See ``Pending``."""
        return self._work is not None and not self._work.is_completed()


class TorchGroup(WorkerGroup):
    """A ``torch.distributed`` process group with names, sequence numbers and a diagnosis of who is missing.

    Args:
        process_group: the torch group; all its members build a TorchGroup of it at the same point.
        timeout: limit of each wait (the process group must have been made with it).
        store: side channel for "why I left"; ``None`` when the group was made by somebody else.
        device: where small control tensors live.
        on_close: called once by ``close``.
    """

    def __init__(
        self,
        process_group: Any,
        timeout: timedelta | None,
        store: Any,
        device: torch.device,
        on_close: Callable[[], None],
    ) -> None:
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.timeout = timeout
        self._group, self._store, self._device, self._on_close = process_group, store, device, on_close
        self._lane: SharedLane | None = None
        self._one_lane = False
        self._routes: dict[Any, Route] = {}
        self._sum_into: SumInto = _left_to_right
        self._find_sum: FindSum = nothing_compiled
        # Gloo ends the process when sizes disagree, so what is about to run is compared first. On GPUs the comparison
        # would stop the stream: only on request.
        self._debug = env.debug_collectives()
        self._compares = device.type == "cpu" or self._debug
        self._agreed = ""
        self._sequence = 0
        self._in_flight: set[int] = set()
        self._error: Exception | None = None
        self._closed = False
        self._peers: list[diagnosis.Peer] = []
        self._prefix = "tfstyle/?"
        me = diagnosis.this_peer(self.rank)
        mine = [me.pid, me.host, me.boot, _next_group_number(), env.shared_memory(), env.host_name()]
        facts = self.gather_objects(mine, "who is there")
        self._peers = [diagnosis.Peer(r, *fact[:3]) for r, fact in enumerate(facts)]
        self._prefix = "tfstyle/" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        self.topology = Topology.of([(*fact[1:3], fact[5]) for fact in facts])
        if all(fact[4] for fact in facts) and self.size > len(self.topology.hosts) and device.type == "cpu":
            self._open_lane()
        self._one_lane = self._lane is not None and len(self.topology.hosts) == 1
        _open_groups.add(self)

    @property
    def process_group(self) -> Any:
        """The torch group."""
        return self._group

    def _open_lane(self) -> None:
        """Maps a segment for each host, if all workers can; its name is gone afterwards, so nothing stays behind."""
        here = self.topology.neighbours(self.rank)
        made = create_segment(len(here)) if self.rank == here[0] else None
        path = self.gather_objects(made, "shared memory")[here[0]]
        lane = None
        if path is not None:
            with suppress(OSError, ValueError):
                state_of = lambda place: self._peers[here[place]].state()  # noqa: E731
                lane = SharedLane(path, here.index(self.rank), len(here), self.timeout, state_of)
        everywhere = all(self.gather_objects(lane is not None, "shared memory is open"))
        remove_segment(made)
        if everywhere and lane is not None:
            self._lane = lane
            self._leave_lane = weakref.finalize(self, lane.leave)

    def use_summation(self, sum_into: SumInto, find_sum: FindSum = nothing_compiled) -> None:
        """See ``WorkerGroup``."""
        self._sum_into, self._find_sum = sum_into, find_sum
        if self._lane is not None:
            self._lane.use_compiled(find_sum)

    # ---- operations -------------------------------------------------------------------------------------------

    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        """See ``WorkerGroup``."""
        route = self._route(buffer.numel(), buffer.dtype, buffer.device.type, method)
        if route is Route.MEMORY:
            self._sum_in_memory(BufferView(buffer), name, method)
            return Done()
        if self._debug or not agreed:
            self._compare_first(name, buffer, f", method {method!r}")
        if route is Route.OWN:
            begin = lambda: dist.all_reduce(buffer, group=self._group, async_op=True)  # noqa: E731
            return self._start(name, buffer, begin, compare=False)
        if route is Route.GATHER:
            return socket_sums.sum_gathered(self, buffer, name, self._adder(method))
        if route is Route.SLICES:
            return socket_sums.sum_slices(self, buffer, name, self._adder(method))
        everybody = tuple(range(self.size))
        if route is Route.HALVING:
            return socket_sums.Stages(None, lambda: socket_sums.sum_by_halving(self, buffer, name, everybody))
        column = self.topology.column(self.rank)
        between = lambda part: socket_sums.sum_by_halving(self, part, name, column)  # noqa: E731
        self._sum_in_memory(BufferView(buffer), name, AggregationMethod.EXPERIMENTAL_TREE, between)
        return Done()

    def meets_in_memory(self, dtype: torch.dtype, device: torch.device) -> bool:
        """See ``WorkerGroup``."""
        return self._one_lane and device.type == "cpu" and dtype in _LANE_TYPES

    def all_reduce_flat(self, values: Flat, name: str, method: int = AggregationMethod.DEFAULT) -> None:
        """See ``WorkerGroup``."""
        if self.meets_in_memory(values.dtype, torch.device("cpu")):
            self._sum_in_memory(values, name, method)
        else:
            super().all_reduce_flat(values, name, method)

    def explain(self, numel: int, dtype: torch.dtype, method: int = AggregationMethod.DEFAULT) -> str:
        """See ``WorkerGroup``."""
        return routes.explain(method, numel * dtype.itemsize, self._place(dtype, self._device.type))

    def _place(self, dtype: torch.dtype, device_type: str) -> routes.Place:
        topology, on_cpu = self.topology, device_type == "cpu"
        memory = self._lane is not None and on_cpu and dtype in _LANE_TYPES
        return routes.Place(
            self.size, len(topology.hosts), topology.aligned, memory, not on_cpu, summable=dtype in _SUMMABLE
        )

    def _route(self, numel: int, dtype: torch.dtype, device_type: str, method: int) -> Route:
        key = (numel, dtype, device_type, method, AggregationMethod.is_default(method))
        route = self._routes.get(key)
        if route is None:
            place, nbytes = self._place(dtype, device_type), numel * dtype.itemsize
            route = self._routes[key] = routes.choose(method, nbytes, place)
            get_logger().debug("%s", routes.explain(method, nbytes, place))
        return route

    def _adder(self, method: int) -> Add:
        order = AggregationMethod.ADD_N if AggregationMethod.is_default(method) else method
        return lambda parts, out: self._sum_into(parts, out, order)

    def _sum_in_memory(
        self, values: Flat, name: str, method: int, between: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        """The sum through shared memory; compared on the way, at no cost."""
        self._raise_if_broken()
        assert self._lane is not None
        text = f"{name} ({values.numel} x {values.dtype}, method {method!r})"
        try:
            with region("all_reduce in shared memory", name):
                digest, add = comparison.digest_of(text), self._adder(method)
                same = self._lane.all_reduce(values, digest, add, between, method)
        except LaneError as error:
            self._fail(Operation(name, self._sequence, _name_of(values.dtype), values.numel, ""), error)
        self._sequence += 1
        if not same:
            self._raise_mismatch(text, name)

    def start_gather(self, buffer: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Pending]:
        """Starts gathering buffers whose sizes are known to agree."""
        out = [torch.empty_like(buffer) for _ in range(self.size)]
        begin = lambda: dist.all_gather(out, buffer, group=self._group, async_op=True)  # noqa: E731
        return out, self._start(name, buffer, begin, compare=False)

    def start_all_to_all(self, buffer: torch.Tensor, name: str) -> tuple[torch.Tensor, Pending]:
        """Starts sending a slice to every worker; see ``socket_sums.Wire``."""
        out = torch.empty_like(buffer)
        begin = lambda: dist.all_to_all_single(out, buffer, group=self._group, async_op=True)  # noqa: E731
        return out, self._start(name, buffer, begin, compare=False)

    def exchange(self, sends: Messages, receives: Messages, name: str) -> None:
        """Sends to and receives from single workers; see ``socket_sums.Wire``."""
        messages = [dist.P2POp(dist.isend, t, group=self._group, group_peer=p) for p, t in sends]
        messages += [dist.P2POp(dist.irecv, t, group=self._group, group_peer=p) for p, t in receives]
        if not messages:
            return
        largest = max((t for _, t in (*sends, *receives)), key=torch.Tensor.numel)
        operation = self._next_operation(name, largest)
        try:
            with region("exchange", name):
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
        except RuntimeError as error:
            self._fail(operation, error)

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        """See ``WorkerGroup``."""
        out = [torch.empty_like(buffer) for _ in range(self.size)]
        self._start(name, buffer, lambda: dist.all_gather(out, buffer, group=self._group, async_op=True)).wait()
        return out

    def numbers(self, number: int, name: str) -> list[int]:
        """See ``WorkerGroup``."""
        return self._exchange(name, name, number)

    def reduce_scatter(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """See ``WorkerGroup``. Gloo has none: the sum is taken whole and sliced."""
        part = buffer.numel() // self.size
        if part * self.size != buffer.numel():
            raise ValueError(
                f"reduce_scatter '{name}': {buffer.numel()} elements do not divide over {self.size} workers."
            )
        if dist.get_backend(self._group) == "nccl":
            out = torch.empty(part, dtype=buffer.dtype, device=buffer.device)
            scatter = lambda: dist.reduce_scatter_tensor(out, buffer, group=self._group, async_op=True)  # noqa: E731
            self._start(name, buffer, scatter).wait()
            return out
        total = buffer.clone()
        self.all_reduce(total, name)
        return total[self.rank * part : (self.rank + 1) * part].clone()

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """See ``WorkerGroup``."""
        start = lambda: dist.broadcast(buffer, group_src=source, group=self._group, async_op=True)  # noqa: E731
        self._start(name, buffer, start).wait()

    def send(self, buffer: torch.Tensor, to: int, name: str) -> None:
        """See ``WorkerGroup``."""
        self._start(name, buffer, lambda: dist.isend(buffer, group=self._group, group_dst=to), compare=False).wait()

    def recv(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """See ``WorkerGroup``."""
        self._start(name, buffer, lambda: dist.irecv(buffer, group=self._group, group_src=source), compare=False).wait()

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """See ``WorkerGroup``: JSON text, so that nothing a peer sends is ever executed."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        sizes = self._exchange(f"gather objects: {name}", name, data.numel())
        parts = self._gather_equal(comparison.padded(data, max(sizes)), name)
        return [json.loads(text) for text in comparison.split_texts(parts, sizes)]

    def agree(self, signature: str, name: str) -> None:
        """See ``WorkerGroup``: one small exchange; the full texts travel only when they differ."""
        if self._compares:
            self._exchange(f"{name} {signature}", name)
            self._agreed = name

    def _exchange(self, text: str, name: str, number: int = 0) -> list[int]:
        """Compares ``text`` over the workers; returns the ``number`` of each.

        Every message of this kind has the same size, so workers that make different calls still understand each other.
        """
        self._agreed = ""
        digest = comparison.digest_of(text)
        if self._one_lane:
            assert self._lane is not None
            self._raise_if_broken()
            try:
                with region("meet for", name):
                    same, numbers = self._lane.compare(digest, number)
            except LaneError as error:
                self._fail(Operation(name, self._sequence, "int64", 2, ""), error)
            self._sequence += 1
        else:
            mine = torch.tensor([digest, number], dtype=torch.int64, device=self._device)
            pairs = [other.tolist() for other in self._gather_equal(mine, name)]
            same, numbers = all(other == digest for other, _ in pairs), [n for _, n in pairs]
        if not same:
            self._raise_mismatch(text, name)
        return numbers

    def _raise_mismatch(self, text: str, name: str) -> NoReturn:
        """All workers see the difference, so all of them come here."""
        gather = functools.partial(self._gather_equal, name=name)
        call = f"{text} at {call_site()}, operation {self._sequence}"
        raise comparison.mismatch(comparison.gather_texts(call, gather, self._device))

    def _gather_equal(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Buffers whose sizes are known to agree."""
        out, pending = self.start_gather(buffer, name)
        pending.wait()
        return out

    # ---- life -------------------------------------------------------------------------------------------------

    def report_failure(self, reason: str) -> None:
        """See ``WorkerGroup``."""
        diagnosis.post(self._store, f"{self._prefix}/failed/{self.rank}", json.dumps(reason))

    def errored(self) -> Exception | None:
        """See ``WorkerGroup``."""
        return self._error

    def members(self) -> Sequence[str]:
        """See ``WorkerGroup``."""
        return [f"worker {p.rank}: pid {p.pid} on {p.host}, {p.state()}" for p in self._peers]

    def neighbours(self) -> Sequence[int]:
        """See ``WorkerGroup``."""
        return self.topology.neighbours(self.rank)

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        """See ``WorkerGroup``."""
        mine, _ = dist.new_subgroups_by_enumeration([list(r) for r in ranks], timeout=self.timeout)
        part = TorchGroup(mine, self.timeout, self._store, self._device, lambda: dist.destroy_process_group(mine))
        part.use_summation(self._sum_into, self._find_sum)
        return part

    def abort(self) -> None:
        """See ``WorkerGroup``."""
        if self._error is None:
            self._error = UnavailableError("This worker group was aborted; build a new strategy.")

    def close(self) -> None:
        """See ``WorkerGroup``."""
        if not self._closed:
            self._closed = True
            _open_groups.discard(self)
            if self._lane is not None:
                self._leave_lane()
                self._lane = None
            idle = self._idle()
            self.abort()
            self._on_close()
            if idle:
                # The last reference: Gloo's threads end here. One that still frees a tensor when the interpreter goes
                # would abort the process. Unfinished transfers would make this wait for the peers, so not then.
                self._group, self._on_close = None, _nothing

    def _idle(self) -> bool:
        """Whether the group works and every transfer has been waited for."""
        return self._error is None and not self._in_flight

    # ---- errors -----------------------------------------------------------------------------------------------

    def _start(self, name: str, buffer: torch.Tensor, begin: Callable[[], Any], compare: bool = True) -> Pending:
        if compare:
            self._compare_first(name, buffer)
        operation = self._next_operation(name, buffer)
        try:
            with region("start", name):
                pending = _Pending(self, operation, begin(), buffer)
        except RuntimeError as error:
            self._fail(operation, error)
        self._in_flight.add(operation.sequence)
        return pending

    def _compare_first(self, name: str, buffer: torch.Tensor, more: str = "") -> None:
        if self._compares and (self._debug or not self._has_agreed(name)):
            self._exchange(f"{name} ({buffer.numel()} x {_name_of(buffer.dtype)}{more})", name)

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error

    def _next_operation(self, name: str, buffer: torch.Tensor) -> Operation:
        """Numbers an operation; raises if the group is broken.

        Its call site costs a walk up the stack: taken when the wait fails, while the caller is still on the stack.
        """
        self._raise_if_broken()
        self._sequence += 1
        return Operation(name, self._sequence - 1, _name_of(buffer.dtype), buffer.numel(), "")

    def _has_agreed(self, name: str) -> bool:
        """Whether ``agree`` was called for ``name``, or for all of ``name[0]``, ``name[1]``, ..., just before."""
        return bool(self._agreed) and name.partition("[")[0] == self._agreed

    def _fail(self, operation: Operation, error: Exception) -> NoReturn:
        """Turns torch's error into ours, with everything that can be found out about the others."""
        if not operation.site:
            operation = Operation(operation.name, operation.sequence, operation.dtype, operation.numel, call_site())
        missing, text = diagnosis.describe_missing(self._store, self._prefix, self.rank, self._peers, str(operation))
        late = any(word in str(error) for word in _TIMED_OUT)
        kind = DeadlineExceededError if late and not missing else PeerLostError
        names = ", ".join(str(r) for r in missing)
        what = f"Worker {names} is missing" if missing else "The workers do not meet"
        limit = "" if self.timeout is None else f" (limit of a wait: {self.timeout.total_seconds():g} s)"
        self._error = kind(
            f"{what}: worker {self.rank} of {self.size} waited in {operation}{limit}.\n{text}\n"
            f"  torch.distributed said: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}\n"
            "Look at the missing worker's own output first. All workers must make the same calls; set "
            "TFSTYLE_DEBUG=collectives to compare them."
        )
        raise self._error from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _left_to_right(parts: Sequence[torch.Tensor], out: torch.Tensor, method: int) -> None:
    """The sum before a strategy says how its sums are made; right for up to three workers."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


_group_number = 0


def _next_group_number() -> int:
    """Counts the groups of this process, so that two groups of the same members are told apart."""
    global _group_number
    _group_number += 1
    return _group_number


_open_groups: weakref.WeakSet[TorchGroup] = weakref.WeakSet()


def _nothing() -> None:
    """What a closed group does when it is closed."""


@atexit.register
def _close_at_exit() -> None:
    """Closes what a program left open, if that cannot wait for a peer."""
    for group in list(_open_groups):
        if group._idle():
            group.close()
