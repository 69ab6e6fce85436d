"""What a worker task holds for one coordinator, and how it runs a scheduled function."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.current_worker import on_worker
from tfstyle_dist.coordinator.references import Incoming
from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import OutOfRangeError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.addresses import as_addresses
from tfstyle_dist.parameter_server.client.module_buffers import Place, places_of, push_buffers, take_over
from tfstyle_dist.parameter_server.client.outdated import check_unwritten
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.client.remote_variables import ServerVariable
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.protocol.work import Work
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.parameter_server import ParameterServerStrategy
from tfstyle_dist.strategies.push_runner import check_unchanged


class Function:
    """A registered function; unpickled when it first runs."""

    __slots__ = ("buffers", "call", "fixed", "parts", "reads", "runs")

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts: Sequence[Any] | None = parts
        self.call: Any = None
        self.fixed: list[RemoteRecord] = []  # module parameters and buffers it can reach
        self.reads: list[RemoteRecord] = []  # what its last run read
        self.buffers: list[Place] = []
        self.runs = 0


class NoValueError(Exception):
    """A result among the arguments is not here; the coordinator will send it."""


class Values:
    """Results that functions on this worker may get as arguments, pickled; the oldest are given up."""

    MOST, MOST_BYTES = 64, 256 << 20

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def put(self, number: int, parts: Sequence[Any]) -> None:
        """Keeps a result."""
        self._parts.pop(number, None)
        self._parts[number] = [bytes(part) for part in parts]

    def get(self, number: int) -> Any:
        """A copy of a result.

        Raises:
            NoValueError: it is not here.
        """
        if number not in self._parts:
            raise NoValueError(number)
        return messages.value_of(self._parts[number])

    def trim(self) -> None:
        """Between two functions: what the next one needs is sent together with it."""
        if not self._parts:
            return
        size = sum(len(part) for parts in self._parts.values() for part in parts)
        while self._parts and (len(self._parts) > self.MOST or size > self.MOST_BYTES):
            size -= sum(map(len, self._parts.pop(next(iter(self._parts)))))


class Session:
    """The work for one coordinator."""

    def __init__(self, meta: dict[str, Any], task: str, index: int) -> None:
        self.name, self.index = str(meta["session"]), index
        cluster = as_addresses(meta["cluster"])
        self.strategy = ParameterServerStrategy.on_worker(
            cluster, self.name, task, meta.get("snapshots"), meta.get("wire")
        )
        self.functions: dict[int, Function] = {}
        self.factories: dict[int, Sequence[Any]] = {}
        self.values = Values()
        self._resources: dict[int, Any] = {}

    def resource(self, number: int) -> Any:
        """This worker's object of a per-worker resource, made at its first use."""
        if number not in self._resources:
            make = pickling.loads(self.factories[number], self.incoming())
            self._resources[number] = make()
        return self._resources[number]

    def incoming(self) -> Incoming:
        """Resolves references."""
        return Incoming(self.strategy, self.index, self.resource, self.values.get)

    def close(self) -> None:
        """Leaves the servers."""
        self.strategy.close()


def run_function(
    session: Session,
    function: Function,
    work: Work,
    arguments: Sequence[Any],
    following: Callable[[], Sequence[RemoteRecord]],
) -> Any:
    """Calls a scheduled function in this process; its value with variables read and tensors detached.

    ``following`` tells what the next function will pull.
    """
    strategy = session.strategy
    servers = strategy.servers
    with on_worker(session.index), entered(Frame(strategy)):
        servers.begin(work)
        fixed: list[RemoteRecord] = []
        try:
            if function.parts is not None:
                incoming = session.incoming()
                function.call = pickling.loads(function.parts, incoming)
                function.fixed, function.parts = list(incoming.seen), None
                function.buffers = places_of(function.call, ())
            args, kwargs, fixed, buffers = (), {}, function.fixed, function.buffers
            if arguments:
                incoming = session.incoming()
                args, kwargs = pickling.loads(arguments, incoming)
                fixed = [*fixed, *incoming.seen]
                if any(record.kind == "buffer" for record in incoming.seen):
                    buffers = [*buffers, *places_of(None, (*args, *kwargs.values()))]
            function.runs += 1
            servers.watches = function.runs & (function.runs - 1) == 0  # in runs 1, 2, 4, 8 and so on
            if fixed or function.reads:
                servers.refresh([*fixed, *function.reads])
            if servers.options.ahead:
                servers.ask_ahead(following())
            try:
                value = function.call(*args, **kwargs)
            except StopIteration:
                raise OutOfRangeError(
                    "A scheduled function let a StopIteration through: an iterator came to its end in it. Schedule no "
                    "more calls than it has elements, or let dataset_fn return one that does not end."
                ) from None
            value = nest.map_structure(_exported, value)
            check_unwritten(fixed)
            if servers.watches:
                check_unchanged(strategy.sent_hyperparameters)
            take_over(buffers)
            push_buffers(servers, fixed)
            function.reads = list(servers.reads)
        except BaseException:
            for record in fixed:
                record.forget()  # the function may have written there
            _settle(servers)
            raise
        servers.end()
    return value


def _settle(servers: Any) -> None:
    """What a failing function had written before stays written, as in TensorFlow."""
    try:
        servers.end()
    except Exception as error:
        get_logger().warning("a write of a function that failed was not taken: %s", error)


def _exported(leaf: Any) -> Any:
    if isinstance(leaf, ServerVariable):
        return leaf.value()
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach()
        return torch.Tensor(leaf) if type(leaf) is not torch.Tensor and leaf.dtype is torch.float32 else leaf.to("cpu")
    return leaf


def error_parts(error: BaseException, where: str) -> list[Any]:
    """A function's error, pickled, with the traceback as a note.

    Args:
        error: what was raised.
        where: name of the task.
    """
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):
        error = RuntimeError(f"a function ended with {error!r}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(f"[tfstyle_dist] raised in a scheduled function on {where}:\n{text}")
    try:
        parts = pickling.dumps(error)
        pickling.loads(parts)
    except Exception:
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        replacement.add_note(f"[tfstyle_dist] raised in a scheduled function on {where}:\n{text}")
        parts = pickling.dumps(replacement)
    return parts
