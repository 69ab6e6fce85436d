"""The parameters, buffers and variables of one strategy: who owns what, and making fresh copies equal."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfstyle_dist.comm import mesh
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.cross_device_ops.collective import true_device
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.first_values import check_same_structure, send_first_values
from tfstyle_dist.variables.gradient_policy import GradientPolicy
from tfstyle_dist.variables.partitioned import LocalParts
from tfstyle_dist.variables.pull import Puller, is_elsewhere
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.replicated import MirroredBuffer, MirroredParameter
from tfstyle_dist.variables.shared_home import SharedHome

_records: WeakIdKeyDictionary = WeakIdKeyDictionary()
_records_lock = threading.Lock()


def find_record(tensor: Any) -> Record | None:
    """The record of any tensor a strategy owns: replicated, variable, component or plain adopted parameter."""
    if not isinstance(tensor, torch.Tensor):
        return None
    record: Record | None = getattr(tensor, "_tfstyle_record", None)
    if record is None:
        entry = _records.get(tensor)
        record = entry() if isinstance(entry, weakref.ref) else entry
    return record


class ParameterStore:
    """Adopts tensors for a strategy and knows them afterwards; weak: it keeps no module alive.

    Args:
        strategy: the owner.
        worker: its local replicas and group.
        parameter_device: the one device of all values under central storage.

    Attributes:
        version: counts adoptions; whoever derives a plan from the parameters compares it.
        placement: where copies live.
        parameter_device: the one device of all values under central storage; ``None`` otherwise.
        shared_home: the memory that the workers share under central storage; ``None`` otherwise.
        puller: makes the copies that replicas on other devices compute with; ``None`` when there are none.
        model_mesh: the workers that share one replica; ``None`` when each worker has its own.
    """

    shared_home: SharedHome | None = None
    model_mesh: Any = None

    def __init__(self, strategy: Any, worker: Worker, parameter_device: ReplicaDevice | None = None) -> None:
        self._strategy = weakref.ref(strategy)
        self.worker, self.parameter_device = worker, parameter_device
        self.placement = Placement.MIRRORED if parameter_device is None else Placement.CENTRAL
        devices = [d.torch_device for d in worker.devices]
        self.puller = None
        if parameter_device is not None and any(is_elsewhere(d, parameter_device.torch_device) for d in devices):
            self.puller = Puller(devices)
        self.version = 0
        self._all: list[weakref.ref[Record]] = []
        self._pending: list[Record] = []
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # A record of a buffer lives as long as the module, because another tensor may take the buffer's place.
        self._buffers: weakref.WeakKeyDictionary[torch.nn.Module, list[Record]] = weakref.WeakKeyDictionary()
        self._separated: weakref.WeakSet[Record] = weakref.WeakSet()
        self._equalizing = False
        self.on_adopt: Callable[[Record], None] | None = None

    @property
    def strategy(self) -> Any:
        """The owning strategy."""
        return self._strategy()

    @property
    def adopts(self) -> bool:
        """Whether modules are taken over: a single replica that computes with its own values needs nothing."""
        return self.worker.num_replicas > 1 or self.puller is not None

    @property
    def replaces(self) -> bool:
        """Whether parameters become objects that show each thread its own copy."""
        return self.worker.num_local_replicas > 1 or self.puller is not None

    def device(self, replica: int, like: torch.device, kind: str = "parameter") -> torch.device:
        """Where replica's copy of a tensor that the user put on ``like`` belongs."""
        if self.puller is not None:
            assert self.parameter_device is not None
            return self.worker.torch_device(replica) if kind == "buffer" else self.parameter_device.torch_device
        if self.worker.one_device() or like.type != self.worker.torch_device(replica).type:
            return like
        return self.worker.torch_device(replica)

    # ---- adoption ---------------------------------------------------------------------------------------------

    def adopt_parameter(self, parameter: torch.nn.Parameter, module: torch.nn.Module | None, name: str) -> Record:
        """Takes a parameter over; with one local replica it stays a plain ``nn.Parameter``."""
        known = find_record(parameter)
        if known is not None:
            self._check_owner(known, name)
            if known.module is None and module is not None and known.kind == "parameter":
                known.module, known.local_name = weakref.ref(module), name
                self._modules.add(module)
            return known
        count = self.worker.num_local_replicas
        components: list[torch.Tensor] = [parameter]
        if self.replaces:
            components = []
            for replica in range(count):
                data = parameter.detach()
                component = torch.nn.Parameter(data.to(self.device(replica, data.device)), parameter.requires_grad)
                components.append(component)
            if type(parameter) is not torch.nn.Parameter:
                raise TypeError(
                    f"Parameter {name!r} has the class {type(parameter).__name__}; only torch.nn.Parameter can be "
                    "replicated inside one process. Build lazy modules by a dry run in the scope first, or run one "
                    "replica per process (torchrun)."
                )
            parameter.__class__ = MirroredParameter
        record = Record(self, parameter, components, "parameter", policy=GradientPolicy())
        if self.replaces:
            parameter._tfstyle_record = record  # type: ignore[attr-defined]
            _register_components(record)
        elif mesh.is_divided(parameter):
            self._take_divided(record, parameter)
        else:
            # The store must not keep the user's parameter alive: with one replica the record refers to it weakly.
            record.components = _WeakComponents(record)
        self._add(record, module, name)
        return record

    def _take_divided(self, record: Record, parameter: torch.nn.Parameter) -> None:
        """A parameter in parts over the model mesh, or one that somebody else (FSDP) divides and reduces."""
        reference = weakref.ref(parameter)
        record.components, record.placement = LocalParts(reference), Placement.SHARDED
        if self.model_mesh is not None and mesh.is_on(parameter, self.model_mesh):
            return
        over = mesh.num_workers(parameter)
        if over < self.worker.group.size:
            raise ValueError(
                f"A parameter is divided over {over} of {self.worker.group.size} workers, and nobody would sum its "
                "gradients over the others. Make the strategy with logical_devices_per_replica, and divide with it."
            )
        record.policy = GradientPolicy("elsewhere")

    def adopt_buffer(self, buffer: torch.Tensor, module: torch.nn.Module | None, name: str) -> Record:
        """Takes a buffer over: floating ones ON_READ + MEAN, others ONLY_FIRST_REPLICA."""
        known = find_record(buffer)
        if known is not None:
            self._check_owner(known, name)
            return known
        mean = buffer.is_floating_point() or buffer.is_complex()
        aggregation = VariableAggregation.MEAN if mean else VariableAggregation.ONLY_FIRST_REPLICA
        count = self.worker.num_local_replicas
        components: list[torch.Tensor] = [buffer]
        if self.replaces:
            components = []
            for replica in range(count):
                copy = buffer.detach().to(self.device(replica, buffer.device, "buffer"))
                components.append(copy.clone() if replica else copy)
            if type(buffer) is torch.Tensor:
                buffer.__class__ = MirroredBuffer
        record = Record(self, buffer, components, "buffer", VariableSynchronization.ON_READ, aggregation)
        if self.replaces:
            buffer._tfstyle_record = record  # type: ignore[attr-defined]
        else:
            record.components = _WeakComponents(record)
        self._add(record, module, name)
        return record

    def add_variable(self, record: Record) -> None:
        """Registers a ``Variable`` that was made with a record of this store."""
        _register_components(record)
        self._add(record, None, record.local_name)

    def _add(self, record: Record, module: torch.nn.Module | None, name: str) -> None:
        record.local_name, record.number = name, self.version
        if module is not None:
            record.module = weakref.ref(module)
            self._modules.add(module)
            if record.kind == "buffer":
                self._buffers.setdefault(module, []).append(record)
        self._all.append(weakref.ref(record))
        keep = record.tensor
        if keep is not None:
            # The record lives as long as the user's tensor.
            with _records_lock:
                _records[keep] = record
        self._pending.append(record)
        self.version += 1
        if self.on_adopt is not None and record.policy is not None and record.policy.reduce_at != "elsewhere":
            self.on_adopt(record)

    def _check_owner(self, record: Record, name: str) -> None:
        if record.store is not self:
            raise RuntimeError(
                f"Mixing different tf.distribute strategies: {name!r} already belongs to {record.store.strategy!r}; it "
                f"cannot be adopted by {self.strategy!r} as well. Build a module of its own for each strategy."
            )

    # ---- looking up -------------------------------------------------------------------------------------------

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """The living records in the order of adoption."""
        for reference in self._all:
            record = reference()
            if record is not None and record.kind == "buffer" and not self.replaces:
                _follow_buffer(record)
            if record is not None and record.tensor is not None and (kind is None or record.kind == kind):
                yield record

    def alive_everywhere(self, records: Sequence[Record]) -> list[Record]:
        """Those of ``records`` that live on all workers; collective.

        A model that is no longer used may wait for the garbage collector on some workers and be gone on others;
        messages laid out by the living records would then differ.
        """
        if self.worker.group.size == 1:
            return list(records)
        numbers = self.worker.group.gather_objects([r.number for r in records], "living parameters")
        common = set(numbers[0]).intersection(*numbers[1:])
        return [r for r in records if r.number in common]

    def owns(self, tensor: Any) -> bool:
        """Whether ``tensor`` belongs to this store."""
        record = find_record(tensor)
        return record is not None and record.store is self

    def name_of(self, record: Record) -> str:
        """The qualified name of a parameter as ``named_parameters()`` of its outermost module gives it."""
        tensor = record.tensor
        children = {id(child) for module in self._modules for child in module.children()}
        for root in self._modules:
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

    def note_separated(self, record: Record) -> None:
        """Remembers that a record's copies have storages of their own until the next update."""
        self._separated.add(record)

    def after_update(self, records: Iterable[Record]) -> None:
        """Carries the first replica's new values to the other copies after an optimizer step."""
        records = list(records)
        for record in records:
            record.changes += 1
        if self.worker.one_device():
            if self._separated:
                for record in list(self._separated):
                    record.fan_out()
                self._separated.clear()
            return
        for record in records:
            record.fan_out()

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
            if self.worker.group.size > 1:
                check_same_structure(self.worker.group, pending)
                moved = pending if self.shared_home is None else self.shared_home.move_in(pending)
                send_first_values(self.worker.group, moved)
            for record in pending:
                if len(record.components) > 1 and not self.worker.one_device():
                    record.fan_out()
                if self.puller is not None and record.kind != "buffer":
                    self._settle_at_home(record)
        finally:
            self._equalizing = False

    def _settle_at_home(self, record: Record) -> None:
        """Puts all copies on the parameter device into one storage, from which GPUs can read at full speed."""
        first = record.components[0].detach().to(self.device(0, record.components[0].device))
        to_gpu = self.worker.devices[0].type == "cuda" and true_device(first).type == "cpu"
        record.set_data(first.pin_memory() if to_gpu else first)

    def ensure_equal_to_read(self) -> None:
        """``ensure_equal`` for a read of a module's parameter; inside the scope it waits for the scope's end.

        Modules read parameters while they fill them: made equal in the middle of that, they would not stay so.
        """
        if self._pending:
            frame = current_frame()
            if frame is None or frame.replica is not None or frame.strategy is not self.strategy:
                self.ensure_equal()


class _WeakComponents(list[torch.Tensor]):
    """The one-entry component list of a plain parameter, without a strong reference to it."""

    def __init__(self, record: Record) -> None:
        super().__init__([torch.empty(0)])
        self._record = weakref.ref(record)

    def __getitem__(self, index: Any) -> Any:
        record = self._record()
        tensor = None if record is None else record.tensor
        if tensor is None:
            raise ReferenceError("the parameter of this record is gone")
        return [tensor][index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self[0]])


def _follow_buffer(record: Record) -> None:
    """``module.double()``, or an assignment in ``forward``, puts a new tensor in a plain buffer's place."""
    module = record.module() if record.module is not None else None
    current = None if module is None else module._buffers.get(record.local_name)
    if current is not None and current is not record.tensor:
        record.rebind(current)
        with _records_lock:
            _records[current] = record


def _register_components(record: Record) -> None:
    """Lets a component be traced to its record; weakly, because the record holds the component."""
    reference = weakref.ref(record)
    with _records_lock:
        for tensor in record.components:
            _records[tensor] = reference
