"""Where tensors are placed on parameter servers, and what this process knows of those that are."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.parameter_server.client.local_copies import adopted, is_placeholder, placeholder
from tfstyle_dist.parameter_server.client.partitioning import shard_count, split_rows
from tfstyle_dist.parameter_server.client.push import Servers
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord, Shard
from tfstyle_dist.parameter_server.client.remote_variables import (
    ServerBuffer,
    ServerParameter,
    ServerVariable,
    ShardedVariable,
)
from tfstyle_dist.parameter_server.client.replaced_tensors import watch
from tfstyle_dist.runtime.context import StrategyInForce
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.component import VariableComponent
from tfstyle_dist.variables.content.parameter_marks import overlap
from tfstyle_dist.variables.creation import VariableSpec
from tfstyle_dist.variables.gradient_policy import GradientPolicy
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.store import ParameterStore

Partition = Callable[..., Sequence[int]]
_VARIABLES: dict[str, Any] = {"variable": ServerVariable, "sharded": ShardedVariable}


class RemoteStore(ParameterStore):
    """Places tensors on the servers and knows them afterwards.

    Args:
        strategy: the owner.
        worker: its one local replica.
        servers: the links.
        partitioner: into how many shards a tensor is cut; ``None``: one.
    """

    def __init__(
        self, strategy: StrategyInForce, worker: Worker, servers: Servers, partitioner: Partition | None
    ) -> None:
        super().__init__(strategy, worker)
        self.servers, self.partitioner, self.placement = servers, partitioner, Placement.REMOTE
        self._next_server = itertools.cycle(range(max(len(servers.links), 1)))
        self.beside: int | None = None  # the server of what is made now, in ``colocate_vars_with``
        self._numbers, self._keys = itertools.count(1), itertools.count(1)
        self._uncreated: list[RemoteRecord] = []
        watch(self)
        self.retold = 0  # how often something changed that a worker learns when a function comes to it
        self._known: dict[int, torch.Tensor] = {}
        self._shares: weakref.WeakKeyDictionary[Record, Record] = weakref.WeakKeyDictionary()

    # ---- placing ----------------------------------------------------------------------------------------------

    def place(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> list[Shard]:
        """Shards of a new tensor: round robin over the servers, in the order of creation.

        Raises:
            ValueError: the partitioner gives something else than one number for each dimension, or cuts another one
                than the first.
        """
        count = 1
        if self.partitioner is not None and len(shape) > 0 and self.beside is None:
            count = shard_count(self.partitioner, shape, dtype, name)
        row = math.prod(shape[1:]) if len(shape) > 0 else 1
        shards, start = [], 0
        for rows in split_rows(shape[0] if len(shape) > 0 else 1, count):
            server = next(self._next_server) if self.beside is None else self.beside
            shards.append(Shard(next(self._numbers), server, start, rows, start * row, rows * row))
            start += rows
        return shards

    # ---- variables --------------------------------------------------------------------------------------------

    def create_variable(self, spec: VariableSpec) -> ServerVariable:
        """Makes a variable with its value on the servers."""
        tensor = spec.initial_tensor().to("cpu").contiguous()
        name = spec.name or "Variable"
        shards = self.place(tuple(tensor.shape), tensor.dtype, name)
        kind = "sharded" if len(shards) > 1 else "variable"
        description = self._describe(kind, next(self._keys), name, tensor, shards)
        description |= {
            "trainable": spec.is_trainable(), "synchronization": spec.synchronization, "aggregation": spec.aggregation
        }  # fmt: skip
        if spec.constraint is not None:
            raise NotImplementedError(
                f"Variable {spec.name!r} has a constraint, which parameter servers do not call: they apply the update. "
                "Constrain the value where it is used, or use assign."
            )
        variable = self._build(description, tensor)
        self.servers.create([variable._tfstyle_record])
        for part in getattr(variable, "_tfstyle_parts", ()):
            part._tfstyle_record.created = True
        assert isinstance(variable, ServerVariable)
        return variable

    def _describe(
        self, kind: str, key: int, name: str, tensor: torch.Tensor, shards: Sequence[Shard]
    ) -> dict[str, Any]:
        return {
            "kind": kind, "key": key, "name": name, "shape": tuple(tensor.shape), "dtype": tensor.dtype,
            "trainable": tensor.requires_grad, "shards": tuple(shards),
            "synchronization": VariableSynchronization.ON_WRITE, "aggregation": VariableAggregation.NONE,
        }  # fmt: skip

    def description(self, tensor: Any) -> dict[str, Any]:
        """What another process needs in order to use a tensor of this store."""
        record: RemoteRecord = tensor._tfstyle_record
        self._check_memory(record)
        self.ensure_equal()
        kind = record.kind if record.kind != "variable" or len(record.shards) == 1 else "sharded"
        local = record.components[0]
        described = self._describe(kind, record.key, record.local_name, local, record.shards)
        module = None if record.module is None else record.module()
        if isinstance(module, torch.nn.Embedding) and module.sparse:
            record.table = True
        if record.table and record.kind == "parameter":
            described["kind"] = "table"  # only the rows that are used travel
        described["synchronization"], described["aggregation"] = record.synchronization, record.aggregation
        if record.kind == "variable":
            described["trainable"] = tensor.trainable
            described["synchronization"] = tensor.synchronization
        return described

    def note_memory_of(self, record: RemoteRecord, data: torch.Tensor) -> None:
        """A tensor is about to get this memory, which may be another one's; two may exchange theirs."""
        kept = {one: other for one, other in self._shares.items() if record not in (one, other)}
        self._shares = weakref.WeakKeyDictionary(kept)
        for other in self.records():
            if other is not record and overlap(data, other.components[0]):
                self._shares[record] = other
                self.retold += 1

    def _check_memory(self, record: RemoteRecord) -> None:
        if (other := self._shares.get(record)) is not None:
            raise ValueError(
                f"{record.describe()!r} was given the memory of {other.describe()!r}, but on the servers each has its "
                "own. To use one parameter in both places, assign the parameter (decoder.weight = encoder.weight); "
                "to copy its values, use copy_ or clone."
            )

    def adopt_description(self, description: dict[str, Any]) -> torch.Tensor:
        """The tensor of this process for a description; always the same one.

        On a worker a module's parameters and buffers are plain tensors that are pulled before each function.
        """
        known = self._known.get(description["key"])
        if known is not None:
            if description["kind"] in ("parameter", "table") and known.requires_grad != description["trainable"]:
                known.requires_grad_(description["trainable"])
            return known
        plain = description["kind"] in ("parameter", "buffer")
        shape, dtype = description["shape"], description["dtype"]
        empty = torch.zeros(shape, dtype=dtype) if plain else placeholder(shape, dtype)
        tensor: torch.Tensor = self._build(description, empty)
        for record in self._records_of(tensor):
            record.created = True
            record.forget()
        self._known[description["key"]] = tensor
        return tensor

    def _records_of(self, tensor: Any) -> list[RemoteRecord]:
        own = find_record(tensor)
        assert isinstance(own, RemoteRecord)
        return [own, *(p._tfstyle_record for p in getattr(tensor, "_tfstyle_parts", ()))]

    def _build(self, description: dict[str, Any], data: torch.Tensor) -> Any:
        kind, name = description["kind"], description["name"]
        if kind in ("parameter", "buffer", "table"):
            return self._build_for_module(description, data)
        wants_grad = description["trainable"] and (data.is_floating_point() or data.is_complex())
        component = VariableComponent(data, requires_grad=wants_grad)
        component._tfstyle_name, component._tfstyle_device = name, torch.device("cpu")
        variable: Any = torch_internals.make_subclass(_VARIABLES[kind], placeholder(data.shape, data.dtype), wants_grad)
        record = RemoteRecord(
            self, variable, [component], "variable", description["synchronization"], description["aggregation"],
            GradientPolicy("push"), key=description["key"], shards=description["shards"],
        )  # fmt: skip
        record.local_name = name
        variable._tfstyle_record = component._tfstyle_record = record  # type: ignore[attr-defined]
        variable._tfstyle_trainable = description["trainable"]
        variable._tfstyle_synchronization = description["synchronization"]
        variable._tfstyle_constraint = None
        self._add(record, None, name)
        if kind == "sharded":
            parts = []
            for index, shard in enumerate(description["shards"]):
                alone = Shard(shard.number, shard.server, 0, shard.rows, 0, shard.numel)
                part = {
                    **description, "kind": "variable", "key": -shard.number, "name": f"{name}/part_{index}",
                    "shape": (shard.rows, *data.shape[1:]), "shards": (alone,),
                }  # fmt: skip
                parts.append(self._build(part, placeholder(part["shape"], data.dtype)))
                self._known[-shard.number] = parts[-1]
            variable._tfstyle_parts = tuple(parts)
        return variable

    def _build_for_module(self, description: dict[str, Any], data: torch.Tensor) -> torch.Tensor:
        """On a worker: the local copy itself; of a sparse table an object that pulls the rows it is asked for."""
        table, buffer = description["kind"] == "table", description["kind"] == "buffer"
        local = data if buffer else torch.nn.Parameter(data, description["trainable"])
        tensor: Any = local
        if table:
            tensor = torch_internals.make_subclass(ServerParameter, data, description["trainable"])
        record = RemoteRecord(
            self,
            tensor,
            [local],
            "buffer" if buffer else "parameter",
            description["synchronization"],
            description["aggregation"],
            None if buffer else GradientPolicy("push"),
            key=description["key"],
            shards=description["shards"],
        )
        record.table, record.fixed = table, not table
        if table:
            tensor._tfstyle_record = record
        self._add(record, None, description["name"])
        return tensor  # type: ignore[no-any-return]

    # ---- modules ----------------------------------------------------------------------------------------------

    def adopt_parameter(self, parameter: torch.nn.Parameter, module: torch.nn.Module | None, name: str) -> RemoteRecord:
        """Takes a parameter over: its value moves to the servers when the scope ends or at its first use."""
        return self._adopt(parameter, module, name, "parameter", ServerParameter, torch.nn.Parameter)

    def adopt_filled(
        self, parameter: Any, module: torch.nn.Module, fill: tuple[str, float, float, int]
    ) -> RemoteRecord:
        """Takes a parameter over whose values the servers make."""
        known = self._adopt(parameter, module, "weight", "parameter", ServerParameter, torch.nn.Parameter)
        known.table = True
        self._uncreated.remove(known)
        self.servers.create([known], fill)
        return known

    def adopt_buffer(self, buffer: torch.Tensor, module: torch.nn.Module | None, name: str) -> RemoteRecord:
        """Takes a buffer over: what a worker's function changes in it is added on the servers."""
        return self._adopt(buffer, module, name, "buffer", ServerBuffer, torch.Tensor)

    def _adopt(
        self, tensor: Any, module: torch.nn.Module | None, name: str, kind: str, new_class: Any, old_class: Any
    ) -> RemoteRecord:
        known = find_record(tensor)
        if known is not None:
            self._check_owner(known, name)
            if known.module is None and module is not None and kind == "parameter":
                known.module, known.local_name = weakref.ref(module), name
            assert isinstance(known, RemoteRecord)
            return known
        if type(tensor) is not old_class or tensor.device.type != "cpu":
            raise TypeError(
                f"{name!r} is a {type(tensor).__module__}.{type(tensor).__name__} on {tensor.device}; parameter "
                f"servers take over plain {kind}s on the CPU. Build lazy modules by a dry run in the scope first, and "
                "move the local copy to a GPU inside the function. For Keras set KERAS_TORCH_DEVICE=cpu."
            )
        # An expanded tensor stands for values that the servers make: it must not become real here.
        data = tensor.detach() if is_placeholder(tensor) else tensor.detach().contiguous()
        component = adopted(tensor, data) if kind == "parameter" else data
        shards = self.place(tuple(data.shape), data.dtype, name)
        tensor.__class__ = new_class
        record = RemoteRecord(
            self, tensor, [component], kind,
            VariableSynchronization.ON_WRITE, VariableAggregation.NONE,
            GradientPolicy("push") if kind == "parameter" else None,
            key=next(self._keys), shards=shards,
        )  # fmt: skip
        tensor._tfstyle_record = record
        self._uncreated.append(record)
        self.retold += 1
        self._add(record, module, name)
        return record

    def ensure_equal(self) -> None:
        """Puts fresh parameters on the servers, once: modules fill their weights after they register them."""
        self._pending.clear()
        if not self._uncreated or self._equalizing:
            return
        self._equalizing = True
        try:
            records = [r for r in self._uncreated if r.tensor is not None]
            self.servers.create(records)
            self._uncreated.clear()
        finally:
            self._equalizing = False
