"""``tf.Variable`` on PyTorch: every synchronization x aggregation, in every context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.core.enums import ReduceOp, VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops.collective import local_sum, reduce_over_workers, true_device
from tfstyle_dist.runtime.context import current_frame, mixing_error
from tfstyle_dist.values import DistributedValues, PerReplica
from tfstyle_dist.variables.gradient_policy import GradientPolicy
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.replicated import Replicated

_write_lock = threading.Lock()

_APPLY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "assign": lambda old, value: value,
    "assign_add": lambda old, value: old + value,
    "assign_sub": lambda old, value: old - value,
}


class VariableComponent(torch.nn.Parameter):
    """One replica's copy of a variable: what ``experimental_local_results`` gives and ``extended.update`` passes."""

    _tfstyle_name: str
    _tfstyle_device: torch.device

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Sets this copy alone. Args and result as in ``Variable.assign``."""
        return self._write("assign", value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Adds to this copy alone."""
        return self._write("assign_add", delta)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtracts from this copy alone."""
        return self._write("assign_sub", delta)

    def value(self) -> torch.Tensor:
        """The copy's value, a new tensor."""
        return self.detach().clone()

    read_value = value

    @property
    def name(self) -> str:
        """The variable's name; ``/replica_k`` is added from the second replica on."""
        return self._tfstyle_name

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a logical CPU keeps its index
        """The replica's device as the user counts it (a logical CPU keeps its index)."""
        return self._tfstyle_device

    def _write(self, op: str, value: Any) -> VariableComponent:
        write_component(self, op, checked(value, self, self._tfstyle_name))
        return self


class Variable(Replicated, torch.nn.Parameter):  # type: ignore[misc]  # __repr__ differs from the stub
    """A tensor that a strategy keeps on its replicas (``tf.Variable``).

    Built inside ``strategy.scope()`` it has one copy on each replica; outside every scope it is an ordinary
    variable. It is a ``torch.nn.Parameter``: use it in any torch expression, give it to an optimizer, register it in a
    module. In replica context an expression reads the replica's own copy.

    Args:
        initial_value: a number, nested list, array or tensor, or a function without arguments that returns one; the
            first worker's value counts.
        trainable: whether it takes gradients; default: yes, but no for ``ON_READ`` and for integers.
        name: for messages and checkpoints; copies are called ``name``, ``name/replica_1``, ...
        dtype: element type; default: the tensor's own, float32 for Python floats. Ignored when ``initial_value`` is a
            tensor of another type: that raises.
        synchronization: when the copies are made equal.
        aggregation: how values written by the replicas combine.

    Raises:
        ValueError: ``NONE`` synchronization under a mirrored strategy, ``MEAN`` of integers, or a bad initial value.

    Example:
        >>> v = Variable(1.0, name="v")
        >>> float(v.assign_add(2.0))
        3.0

    Source: ``tf.Variable``.
    """

    _tfstyle_record: Record

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Variable:
        """Builds what the strategy in force makes of it."""
        if not isinstance(synchronization, VariableSynchronization):
            raise ValueError(f"synchronization must be a VariableSynchronization, got {synchronization!r}.")
        if not isinstance(aggregation, VariableAggregation):
            raise ValueError(f"aggregation must be a VariableAggregation, got {aggregation!r}.")
        frame = current_frame()
        spec = VariableSpec(initial_value, trainable, name, dtype, synchronization, aggregation)
        if frame is None or frame.component is not None:
            return default_creator(spec)
        return frame.strategy.create_variable(spec)  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``, which may return the variable another replica made."""

    # ---- reading ----------------------------------------------------------------------------------------------

    def _tfstyle_value(self) -> torch.Tensor:
        record = self._tfstyle_record
        record.store.ensure_equal()
        index = record.index()
        if index is not None or record.synchronization is not VariableSynchronization.ON_READ:
            return record.components[index or 0]
        return read_across_replicas(record, self.name)

    def value(self) -> torch.Tensor:
        """The value in the calling context, a new tensor.

        Raises:
            ValueError: a cross-replica read of an ``ON_READ`` variable with aggregation ``NONE``.
        """
        return self._tfstyle_value().detach().clone()

    read_value = value

    @property
    def name(self) -> str:
        """The name given at creation."""
        return self._tfstyle_record.local_name

    @property
    def trainable(self) -> bool:
        """Whether gradients are taken."""
        return self._tfstyle_trainable  # type: ignore[attr-defined,no-any-return]

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are made equal."""
        return self._tfstyle_synchronization  # type: ignore[attr-defined,no-any-return]

    @property
    def aggregation(self) -> VariableAggregation:
        """How written values combine."""
        return self._tfstyle_record.aggregation

    # ---- writing ----------------------------------------------------------------------------------------------

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Sets the variable.

        In replica context the replicas' values combine by ``aggregation`` (a collective call for SUM, MEAN and
        ONLY_FIRST_REPLICA of an ON_WRITE variable: all replicas must make it); in cross-replica context every copy
        gets the value (an ON_READ SUM variable: value / n each).

        Args:
            value: number, array or tensor of the variable's shape and dtype.
            use_locking: accepted for TF's signature; without effect.
            name: accepted for TF's signature; without effect.
            read_value: accepted for TF's signature; the result is always readable.

        Returns:
            The variable; for a cross-replica write of an ON_READ variable the aggregated value.

        Raises:
            ValueError: wrong shape or dtype; or a bare Python number under SUM with several replicas.
            RuntimeError: called in the context of another strategy.
        """
        return self._assign("assign", value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Adds ``delta``; with SUM the sum of all replicas' deltas is added once. See ``assign``."""
        return self._assign("assign_add", delta)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtracts ``delta``. See ``assign``."""
        return self._assign("assign_sub", delta)

    def _assign(self, op: str, value: Any) -> Any:
        record = self._tfstyle_record
        record.store.ensure_equal()
        strategy, frame = record.store.strategy, current_frame()
        if frame is not None and frame.strategy is not strategy and not self._tfstyle_plain():
            raise mixing_error(strategy, frame.strategy, f"assigning variable {self.name!r}")
        index = record.index()
        if self._tfstyle_plain():
            component = record.components[0]
            write_component(component, op, checked(value, component, self.name))
            return self
        if index is None:
            return self._assign_in_cross_replica_context(op, value)
        assert frame is not None
        component = record.components[index]
        local = (
            frame.component is not None
            or record.synchronization is VariableSynchronization.ON_READ
            or record.aggregation is VariableAggregation.NONE
        )
        if local:
            value = checked(value, component, self.name)
            if frame.component is None:
                record.separate()
            write_component(component, op, value)
            return self
        self._assign_together(op, value, frame.replica)
        return self

    def _tfstyle_plain(self) -> bool:
        """Whether this is an ordinary variable, without policies."""
        return not isinstance(self, DistributedVariable)

    def _assign_together(self, op: str, value: Any, replica: Any) -> None:
        """ON_WRITE with SUM, MEAN or ONLY_FIRST_REPLICA in replica context: one joint write."""
        record = self._tfstyle_record
        aggregation, worker = record.aggregation, record.store.worker
        if aggregation is VariableAggregation.SUM and not isinstance(value, torch.Tensor) and worker.num_replicas > 1:
            raise ValueError(
                f"{value!r} cannot be reduced: variable {self.name!r} has aggregation SUM over {worker.num_replicas} "
                f"replicas, and a Python value is the same on all of them, so its sum is not defined. Pass a "
                f"tensor, e.g. "
                f"variable.{op}(torch.tensor({value!r}))."
            )
        value = checked(value, record.components[replica.local_replica_id], self.name)

        def write(values: list[torch.Tensor]) -> list[None]:
            total = combine(record, values)
            write_all(record, op, total)
            return [None] * len(values)

        replica.meet(f"{op} of variable {self.name!r}", value, write)

    def _assign_in_cross_replica_context(self, op: str, value: Any) -> Any:
        record = self._tfstyle_record
        first, on_read = record.components[0], record.synchronization is VariableSynchronization.ON_READ
        values = [checked(v, first, self.name) for v in per_component(value, len(record.components))]
        if not on_read:
            if len({id(v) for v in values}) > 1:
                record.separate()
                for component, part in zip(record.components, values, strict=True):
                    write_component(component, op, part)
            else:
                write_all(record, op, values[0])
            return self
        if record.aggregation is VariableAggregation.SUM:
            if op != "assign":
                raise ValueError(
                    f"{op} of ON_READ variable {self.name!r} with aggregation SUM is not defined in "
                    f"cross-replica context: "
                    "each replica holds a part of the sum. Call it inside strategy.run, or use assign."
                )
            count = record.store.worker.num_replicas
            values = [v / count if v.is_floating_point() or v.is_complex() else v // count for v in values]
        for component, part in zip(record.components, values, strict=True):
            write_component(component, op, part)
        return read_across_replicas(record, self.name)


class DistributedVariable(DistributedValues, Variable):  # type: ignore[misc]  # Tensor._values is for sparse tensors
    """A variable with copies on the replicas of a strategy."""

    @property
    def values(self) -> tuple[Any, ...]:  # type: ignore[override]  # Tensor.values() is for sparse tensors
        """The copies of this worker's replicas."""
        self._tfstyle_record.store.ensure_equal()
        return tuple(self._tfstyle_record.components)


# ---- creation -----------------------------------------------------------------------------------------------------


class VariableSpec:
    """The arguments of ``Variable(...)`` on their way through the strategy in force."""

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None,
        name: str | None,
        dtype: torch.dtype | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        self.initial_value, self.trainable, self.name, self.dtype = initial_value, trainable, name, dtype
        self.synchronization, self.aggregation = synchronization, aggregation

    def initial_tensor(self) -> torch.Tensor:
        """The first value as a new tensor; a callable is called once."""
        value = (
            self.initial_value()
            if callable(self.initial_value) and not isinstance(self.initial_value, torch.Tensor)
            else self.initial_value
        )
        if value is None:
            raise ValueError(
                "Variable needs an initial_value: a number, list, array or tensor, or a function returning one."
            )
        if isinstance(value, PerReplica):
            raise ValueError("initial_value must be the same on all replicas, got a PerReplica; pass one tensor.")
        try:
            with torch.no_grad():
                if isinstance(value, torch.Tensor):
                    tensor = value.detach().clone()
                    return tensor if self.dtype is None else tensor.to(self.dtype)
                return torch.tensor(value, dtype=self.dtype)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"initial_value {value!r} is not a number, list, array or tensor: {error}") from error

    def is_trainable(self) -> bool:
        """``trainable``, or its default for the synchronization."""
        if self.trainable is None:
            return self.synchronization is not VariableSynchronization.ON_READ
        return self.trainable


def build_variable(cls: type[Variable], spec: VariableSpec, store: Any, tensor: torch.Tensor, shown: Any) -> Variable:
    """Makes the variable object and its components, and registers them.

    Args:
        cls: ``Variable`` or ``DistributedVariable``.
        spec: what was asked for; its synchronization decides how copies behave.
        store: the ParameterStore of the owner.
        tensor: the initial value.
        shown: the synchronization that the user sees.
    """
    trainable = spec.is_trainable()
    wants_grad = trainable and (tensor.is_floating_point() or tensor.is_complex())
    name = spec.name or "Variable"
    separate = spec.synchronization is VariableSynchronization.ON_READ
    components: list[torch.Tensor] = []
    for replica in range(store.worker.num_local_replicas if cls is DistributedVariable else 1):
        target = store.worker.torch_device(replica) if store.worker.devices else tensor.device
        data = tensor.to(target)
        if separate and replica > 0:
            data = data.clone()
        component = VariableComponent(data, requires_grad=wants_grad)
        component._tfstyle_name = name if replica == 0 else f"{name}/replica_{replica}"
        component._tfstyle_device = store.worker.devices[replica].logical if store.worker.devices else data.device
        components.append(component)
    variable: Variable = torch.Tensor._make_subclass(cls, components[0].detach(), wants_grad)
    record = Record(store, variable, components, "variable", spec.synchronization, spec.aggregation, GradientPolicy())
    record.local_name = name
    variable._tfstyle_record = record
    variable._tfstyle_trainable = trainable  # type: ignore[attr-defined]
    variable._tfstyle_synchronization = shown  # type: ignore[attr-defined]
    store.add_variable(record)
    return variable


_default_creator: list[Callable[[VariableSpec], Variable]] = []


def set_default_creator(creator: Callable[[VariableSpec], Variable]) -> None:
    """Says how variables are made outside every scope; called once, by the default strategy's module."""
    _default_creator[:] = [creator]


def default_creator(spec: VariableSpec) -> Variable:
    """Outside every scope: an ordinary variable of the default strategy."""
    return _default_creator[0](spec)


# ---- values -------------------------------------------------------------------------------------------------------


def checked(value: Any, like: torch.Tensor, name: str) -> torch.Tensor:
    """``value`` as a tensor that fits the variable.

    Raises:
        InvalidArgumentError: wrong shape or dtype.
    """
    if isinstance(value, Replicated):
        value = value._tfstyle_value()
    where = true_device(like)
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.dtype != like.dtype:
            raise InvalidArgumentError(
                f"Variable {name!r} has dtype {like.dtype}, but the assigned tensor has {tensor.dtype}; write "
                f"value.to({like.dtype})."
            )
        tensor = tensor.to(where)
    else:
        try:
            tensor = torch.as_tensor(value, dtype=like.dtype, device=where)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"Variable {name!r} was assigned {value!r}, which is no tensor: {error}"
            ) from error
    if tensor.shape != like.shape:
        raise InvalidArgumentError(
            f"Variable {name!r} has shape {tuple(like.shape)}, but the assigned value has shape {tuple(tensor.shape)}."
        )
    return tensor


def per_component(value: Any, count: int) -> list[Any]:
    """The value for each component: a PerReplica's own entries, else the same for all."""
    return list(value.values) if isinstance(value, PerReplica) else [value] * count


def write_component(component: torch.Tensor, op: str, value: torch.Tensor) -> None:
    """Applies one write to one copy; replica threads that write the same copy take turns."""
    with _write_lock, torch.no_grad():
        component.copy_(_APPLY[op](component, value))


def write_all(record: Record, op: str, value: torch.Tensor) -> None:
    """Applies one write to every copy, once to those that share their storage."""
    seen: set[int] = set()
    for component in record.components:
        if component.data_ptr() not in seen or component.numel() == 0:
            seen.add(component.data_ptr())
            write_component(component, op, value.to(true_device(component)))


def combine(record: Record, values: list[torch.Tensor]) -> torch.Tensor:
    """The value that all replicas of all workers write together."""
    worker = record.store.worker
    if record.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        first = values[0].detach().clone()
        if worker.group.size > 1 and record.store.strategy.first_replica_is_global:
            worker.group.broadcast(first, 0, f"first replica's value of {record.local_name!r}")
        return first
    op = ReduceOp.SUM if record.aggregation is VariableAggregation.SUM else ReduceOp.MEAN
    total = reduce_over_workers(worker, op, local_sum(values), f"variable {record.local_name!r}")
    return total.to(values[0].dtype)


def read_across_replicas(record: Record, name: str) -> torch.Tensor:
    """The aggregated value of an ON_READ variable.

    Raises:
        ValueError: its aggregation is NONE.
    """
    if record.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"ON_READ variable {name!r} has aggregation NONE: its copies cannot be read in cross-replica "
            f"context. Read it "
            "inside strategy.run, take experimental_local_results(variable), or give it an aggregation."
        )
    with torch.no_grad():
        return combine(record, [c.detach() for c in record.components])
