"""What a worker task holds for one coordinator, and how it runs a scheduled function."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.current_worker import on_worker
from tfstyle_dist.coordinator.references import Incoming
from tfstyle_dist.core import nest, torch_internals
from tfstyle_dist.core.errors import OutOfRangeError
from tfstyle_dist.core.logging import get_logger, warn_once
from tfstyle_dist.parameter_server.addresses import as_addresses
from tfstyle_dist.parameter_server.client.module_buffers import (
    Place,
    check_parameters_are_there,
    places_of,
    push_buffers,
    take_over,
)
from tfstyle_dist.parameter_server.client.outdated import check_unwritten
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.client.remote_variables import ServerVariable
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.protocol.work import Work
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.parameter_server.optimizer_settings import check_unchanged, take_settings
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy


class Function:
    """A registered function; unpickled when it first runs."""

    __slots__ = ("call", "captured", "fixed", "parts", "places", "reads", "runs")

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts: Sequence[Any] | None = parts
        self.call: Any = None
        self.fixed: list[RemoteRecord] = []  # module parameters and buffers it can reach
        self.reads: list[RemoteRecord] = []  # what its last run read
        self.places: list[Place] = []
        self.captured: list[tuple[torch.Tensor, int]] = []  # tensors that came with it, and their versions then
        self.runs = 0

    def load(self, incoming: Incoming) -> None:
        """Unpickles it, before its first run."""
        if self.parts is None:
            return
        made: list[torch.Tensor] = []
        self.call = pickling.loads(self.parts, incoming, made)
        self.fixed, self.parts = list(incoming.seen), None
        self.places = places_of(self.call, ())
        self.captured = [(tensor, torch_internals.version_of(tensor)) for tensor in made]

    def warn_of_writes(self) -> None:
        """Says once that what it wrote to its own copy of a tensor stays here."""
        for tensor, version in self.captured:
            if torch_internals.version_of(tensor) != version:
                name = getattr(self.call, "__qualname__", type(self.call).__name__)
                warn_once(
                    f"writes of {name}",
                    f"The scheduled function {name} wrote to a tensor of shape {tuple(tensor.shape)} that came with "
                    "it: the coordinator's program and the other workers do not see that. Make it a tfd.Variable and "
                    "assign to it, make its module in strategy.scope(), or return what is to be known.",
                )
                return


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
        self.settings: dict[int, Any] = {}  # of optimizers, by number, as far as they are new
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
            function.load(session.incoming())
            args, kwargs, fixed, places = (), {}, function.fixed, function.places
            if arguments:
                incoming = session.incoming()
                args, kwargs = pickling.loads(arguments, incoming)
                fixed = [*fixed, *incoming.seen]
                if incoming.seen:
                    places = [*places, *places_of(None, (*args, *kwargs.values()))]
            take_settings(strategy, session.settings)
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
                check_parameters_are_there(places)
                function.warn_of_writes()
            take_over(places)
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
