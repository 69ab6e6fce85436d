"""The parameters, buffers and variables of one strategy: who owns what, and making fresh copies equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.devices import ReplicaDevice, is_accelerator
from tfstyle_dist.runtime.context import StrategyInForce, current_frame
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.adopted_records import buffer_record, parameter_record, tie_buffer
from tfstyle_dist.variables.central.shared_home import SharedHome
from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.content.copies import move_in_place
from tfstyle_dist.variables.content.object_content import when_gone
from tfstyle_dist.variables.content.state_objects import check_adoptable
from tfstyle_dist.variables.first_values import of_the_same_structure, send_first_values
from tfstyle_dist.variables.known_tensors import find_record, follow_buffer, remember, remember_components
from tfstyle_dist.variables.ordered import WeakOrderedSet
from tfstyle_dist.variables.record import Living, MadeInTurns, Placement, Record

live_stores: weakref.WeakSet[ParameterStore] = weakref.WeakSet()
"""Those that take modules over."""


class ParameterStore:
    """Adopts tensors for a strategy and knows them afterwards; weak: it keeps no module alive.

    Args:
        strategy: the owner.
        worker: its local replicas and group.
        parameter_device: the one device of all values under central storage.

    Attributes:
        version: counts adoptions; whoever derives a plan from the parameters compares it.
        on_adopt: called with each record that is new.
        make_equal: gives records that are new the same values on all workers, where the group does not do it.
        placement: where copies live.
        parameter_device: the one device of all values under central storage; ``None`` otherwise.
        shared_home: the memory that the workers share under central storage; ``None`` otherwise.
        contents: what the objects of modules hold for each local replica; ``None`` where a replica computes with the
            objects as they are.
        model_mesh: the workers that share one replica; ``None`` when each worker has its own.
        runs: counts the calls of ``run``; the same on all workers.
    """

    shared_home: SharedHome | None = None
    model_mesh: Any = None

    def __init__(
        self, strategy: StrategyInForce, worker: Worker, parameter_device: ReplicaDevice | None = None
    ) -> None:
        self._strategy = weakref.ref(strategy)
        # Variables are read after it is gone, too.
        self.ops, self.first_replica_is_global = strategy.cross_device_ops, strategy.first_replica_is_global
        self.worker, self.parameter_device = worker, parameter_device
        self.placement = Placement.MIRRORED if parameter_device is None else Placement.CENTRAL
        home = None if parameter_device is None else parameter_device.torch_device
        self.contents: ReplicaContents | None = None
        if worker.num_local_replicas > 1 or (home is not None and worker.computes_elsewhere(home)):
            self.contents = ReplicaContents(worker, home, self.adopt_strays_of, self._run)
            self._taken = -1
            worker.executor.content = self.contents
            self._gone = weakref.ref(strategy, when_gone(self.contents.release, 0))
        self.version, self.runs, self.made = 0, 0, MadeInTurns()
        self._all: WeakOrderedSet[Record] = WeakOrderedSet()
        self._pending: list[Record] = []
        # With each the records of its buffers, which live as long: another tensor may take a buffer's place.
        self.modules: WeakOrderedSet[torch.nn.Module] = WeakOrderedSet()
        self._equalizing = False
        self.on_adopt: Callable[[Record], None] | None = None
        self.make_equal: Callable[[list[Record]], None] | None = None
        if self.adopts:
            live_stores.add(self)

    @property
    def strategy(self) -> Any:
        """The owning strategy."""
        return self._strategy()

    @property
    def adopts(self) -> bool:
        """Whether modules are taken over: a single replica that computes with its own values needs nothing."""
        return self.worker.num_replicas > 1 or self.contents is not None

    def device(self, replica: int, like: torch.device) -> torch.device:
        """Where replica's copy of a tensor that the user put on ``like`` belongs."""
        if self.parameter_device is not None and self.contents is not None:
            return self.parameter_device.torch_device
        own = self.worker.torch_device(replica)
        if like.type == own.type:
            return like if self.worker.one_device() else own
        return own if like.type == "cpu" and is_accelerator(own.type) else like

    @property
    def places(self) -> bool:
        """Whether what modules register in the scope belongs on another device than the CPU."""
        own = self.worker.torch_device(0) if self.parameter_device is None else self.parameter_device.torch_device
        return is_accelerator(own.type)

    def bring_home(self, tensor: torch.Tensor) -> None:
        """Moves a parameter or buffer that was made on the CPU to where it belongs, as TensorFlow does; in place."""
        if tensor.device.type != (home := self.device(0, tensor.device)).type:
            move_in_place(tensor, home)

    def _run(self, function: Callable[[], None]) -> None:
        self.strategy.run(function)

    def prepare(self, function: Any, arguments: Iterable[Any]) -> None:
        """Finds what the replicas of this process will use, and makes its content theirs.

        Args:
            function: what ``run`` was given; ``None``: only what was adopted.
            arguments: its arguments.
        """
        contents = self.contents
        if contents is None:
            return
        if self._taken != self.version:
            self._taken = self.version
            for record in self.records("parameter"):
                contents.take(record.tensor)
            for module in list(self.modules):
                contents.take(module)
        (found := contents.discovery).look(function, arguments)
        if function is not None:  # else only what was adopted is looked at, maybe inside a run
            contents.watch(found.tensors, found.carrying)
            contents.settings.iterators = found.iterators
        found.forget()
        contents.finish_taking()

    def adopt_object(self, thing: Any) -> None:
        """Makes the attributes of any object content, so that each replica of this process has its own."""
        if self.contents is not None:
            if not isinstance(thing, torch.Tensor):
                self.contents.discovery.look(None, (thing,))
                if not self.contents.holds(thing):
                    check_adoptable(thing)
            self.contents.take_object(thing)
            self.contents.finish_taking()

    def adopt_strays_of(self, module: torch.nn.Module) -> None:
        """A module of this strategy may have parameters that came past torch's registration: they are adopted too."""
        for name, parameter in torch_internals.parameters_of(module).items() if module in self.modules else ():
            has_shape = not isinstance(parameter, torch.nn.UninitializedParameter)
            if has_shape and isinstance(parameter, torch.nn.Parameter) and find_record(parameter) is None:
                self.adopt_parameter(parameter, module, name)

    def adopt_strays(self) -> None:
        """Adopts such parameters of all modules, e.g. after ``to_empty``."""
        for module in list(self.modules):
            self.adopt_strays_of(module)

    def settle(self) -> None:
        """What was written in cross-replica context reaches all replicas of this process now."""
        if self.contents is not None:
            self.prepare(None, ())
            self.contents.settle()

    # ---- adoption ---------------------------------------------------------------------------------------------

    def adopt_parameter(self, parameter: torch.nn.Parameter, module: torch.nn.Module | None, name: str) -> Record:
        """Takes a parameter over."""
        known = find_record(parameter)
        if known is not None:
            self._check_owner(known, name)
            if known.module is None and module is not None and known.kind == "parameter":
                self._tie(known, module, name)
            return known
        record = parameter_record(self, parameter)
        self._add(record, module, name)
        return record

    def adopt_buffer(self, buffer: torch.Tensor, module: torch.nn.Module | None, name: str) -> Record:
        """Takes a buffer over."""
        known = find_record(buffer)
        if known is not None:
            self._check_owner(known, name)
            if module is not None and known.kind == "buffer" and (known.module is None or known.module() is not module):
                self._tie(known, module, name)  # as convert_sync_batchnorm gives them to other modules
            return known
        record = buffer_record(self, buffer, module)
        self._add(record, module, name)
        return record

    def add_variable(self, record: Record) -> None:
        """Registers a ``Variable`` that was made with a record of this store."""
        remember_components(record)
        self._add(record, None, record.local_name)

    def _add(self, record: Record, module: torch.nn.Module | None, name: str) -> None:
        record.local_name, record.number = name, self.version
        if module is not None:
            self._tie(record, module, name)
        self._all.add(record)
        if (keep := record.tensor) is not None:
            remember(keep, record)
        self._pending.append(record)
        self.version += 1
        if self.on_adopt is not None and record.policy is not None and record.policy.reduce_at != "elsewhere":
            self.on_adopt(record)

    def _tie(self, record: Record, module: torch.nn.Module, name: str) -> None:
        record.module, record.local_name = weakref.ref(module), name
        living = self.modules.add(module)
        if record.kind == "buffer":
            tie_buffer(record, module, name, living)

    def _check_owner(self, record: Record, name: str) -> None:
        if record.store is not self:
            raise RuntimeError(
                f"Mixing different tf.distribute strategies: {name!r} already belongs to "
                f"{record.store.strategy or 'a strategy that is gone'}; it cannot be adopted by {self.strategy!r} as "
                "well. Build a module of its own for each strategy."
            )

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """The living records in the order of adoption."""
        for record in self._all:
            if record.kind == "buffer":
                follow_buffer(record)
            if record.tensor is not None and (kind is None or record.kind == kind):
                yield record

    def alive_everywhere(self, records: Iterable[Record]) -> Living:
        """Those of ``records`` that live on all workers, and stay as long as the result; collective.

        A model that is no longer used may wait for the garbage collector on some workers and be gone on others;
        messages laid out by the living records would then differ.
        """
        here = Living(records)
        if self.worker.group.size == 1:
            return here
        numbers = self.worker.group.gather_objects([r.number for r in here], "living parameters")
        common = set(numbers[0]).intersection(*numbers[1:])
        return Living(r for r in here if r.number in common)

    def owns(self, tensor: Any) -> bool:
        """Whether ``tensor`` belongs to this store."""
        record = find_record(tensor)
        return record is not None and record.store is self

    def name_of(self, record: Record) -> str:
        """The qualified name of a parameter as ``named_parameters()`` of its outermost module gives it."""
        tensor = record.tensor
        children = {id(child) for module in self.modules for child in module.children()}
        for root in self.modules:
            if id(root) in children:
                continue
            for name, entry in (*root.named_parameters(), *root.named_buffers()):
                if entry is tensor:
                    return name
        return record.local_name or "unnamed"

    def names_of(self, records: Sequence[Record], most: int = 8) -> str:
        """The names of some records for a message."""
        names = [self.name_of(r) for r in records[:most]]
        return ", ".join(names) + (f", ... ({len(records)} in all)" if len(records) > most else "")

    # ---- equal copies -----------------------------------------------------------------------------------------

    def ensure_equal(self) -> None:
        """Gives fresh parameters the first worker's values, once: one flat broadcast per dtype.

        Modules fill their weights after they register them, so this runs at the scope's exit or at the first use.

        Raises:
            CollectiveMismatchError: the workers built different structures; the message says where they differ.
        """
        if not self._pending or self._equalizing:
            return
        self._equalizing = True
        try:
            elsewhere = [r for r in self._pending if r.policy is not None and r.policy.reduce_at == "elsewhere"]
            pending = [r for r in self._pending if r.tensor is not None and r not in elsewhere]
            self._pending = []
            if not self.worker.group.alone:
                pending = of_the_same_structure(self.worker.group, pending)
                moved = pending if self.shared_home is None else self.shared_home.move_in(pending)
                send_first_values(self.worker.group, moved)
            elif self.make_equal is not None and pending:
                self.make_equal(Living(pending))
        finally:
            self._equalizing = False

    def ensure_equal_to_read(self) -> None:
        """``ensure_equal`` for a read of a module's parameter; inside the scope it waits for the scope's end.

        Modules read parameters while they fill them: made equal in the middle of that, they would not stay so.
        """
        if self._pending:
            frame = current_frame()
            if frame is None or frame.replica is not None or frame.strategy is not self.strategy:
                self.ensure_equal()
