"""``tf.Variable`` on PyTorch: every synchronization x aggregation, in every context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.runtime.context import current_frame, mixing_error
from tfstyle_dist.values import DistributedValues, Share
from tfstyle_dist.variables.component import (
    checked,
    combine,
    per_component,
    read_across_replicas,
    without_nan,
    write_all,
    write_component,
)
from tfstyle_dist.variables.creation import VariableSpec, default_creator
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.replicated import Replicated
from tfstyle_dist.variables.rows import RowMethods
from tfstyle_dist.variables.scatter import read_places, read_rows, scatter


class Variable(RowMethods, Replicated, torch.nn.Parameter):  # type: ignore[misc]  # __repr__ differs from the stub
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
        constraint: called with the value after a ``train`` optimizer has updated it, returns the value to keep, e.g. of
            a norm of at most 1; ``assign`` and plain ``torch.optim`` optimizers do not call it.
        synchronization: when the copies are made equal.
        aggregation: how values written by the replicas combine.

    Raises:
        ValueError: ``NONE`` synchronization under a mirrored strategy, ``MEAN`` of integers, or a bad initial value.

    Example:
        >>> v = Variable(1.0, name="v")
        >>> v.assign_add(2.0).numpy()
        array(3., dtype=float32)

    Source: ``tf.Variable``.
    """

    _tfstyle_record: Record

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        constraint: Callable[[torch.Tensor], torch.Tensor] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Variable:
        """Builds what the strategy in force makes of it."""
        if not isinstance(synchronization, VariableSynchronization):
            raise ValueError(f"synchronization must be a VariableSynchronization, got {synchronization!r}.")
        if not isinstance(aggregation, VariableAggregation):
            raise ValueError(f"aggregation must be a VariableAggregation, got {aggregation!r}.")
        if constraint is not None and not callable(constraint):
            raise ValueError(f"Argument `constraint` must be None or a callable, got {constraint!r}.")
        frame = current_frame()
        spec = VariableSpec(initial_value, trainable, name, dtype, synchronization, aggregation, constraint)
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
            return record.value()
        return read_across_replicas(record, self.name)

    def value(self) -> torch.Tensor:
        """The value in the calling context, a new tensor.

        Raises:
            ValueError: a cross-replica read of an ``ON_READ`` variable with aggregation ``NONE``.
        """
        return self._tfstyle_value().detach().clone()

    read_value = value

    def numpy(self, *, force: bool = False) -> Any:
        """``value()`` as a numpy array with memory of its own (``tf.Variable.numpy``); ``force`` as in torch."""
        return self.value().cpu().numpy(force=force)

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

    @property
    def constraint(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What optimizers make the value satisfy; ``None`` for nothing."""
        return self._tfstyle_constraint  # type: ignore[attr-defined,no-any-return]

    def sparse_read(self, indices: Any, name: str | None = None) -> torch.Tensor:
        """``value[indices]``: rows by number, differentiable; TensorFlow's mirrored variables lack it.

        Args:
            indices: int row numbers of any shape.
            name: accepted for TF's signature.

        Returns:
            A tensor of shape ``(*indices.shape, *row shape)``.

        Raises:
            InvalidArgumentError: a row that does not exist.
        """
        return read_rows(self._tfstyle_value(), indices, self.name)

    def gather_nd(self, indices: Any, name: str | None = None) -> torch.Tensor:
        """``value[indices[..., 0], indices[..., 1], ...]``, differentiable; TensorFlow's mirrored variables lack it.

        Args:
            indices: int places; the last dimension holds the numbers of one place, or of one row.
            name: accepted for TF's signature.

        Raises:
            InvalidArgumentError: a place that does not exist.
        """
        return read_places(self._tfstyle_value(), indices, self.name)

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

    def _tfstyle_scatter(self, op: str, sparse_delta: Any) -> Any:
        return scatter(self, op, sparse_delta)

    def _assign(self, op: str, value: Any) -> Any:
        try:
            return self._assign_in_context(op, value)
        finally:
            self._tfstyle_record.changes += 1

    def _assign_in_context(self, op: str, value: Any) -> Any:
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
            if frame.component is None and record.placement is Placement.CENTRAL and strategy.num_replicas_in_sync > 1:
                raise ValueError(
                    f"You must specify an aggregation method to update the variable {self.name!r} in replica context: "
                    "under central storage it has one copy, and aggregation NONE does not say how the replicas' values "
                    "combine. Create it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA."
                )
            value = checked(value, component, self.name)
            share = None if frame.replica is None else frame.replica.share
            if share is not None and share.examples == 0:
                value = without_nan(op, value, component)
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
                "replicas, and a Python value is the same on all of them, so its sum is not defined. Pass a tensor, "
                f"e.g. variable.{op}(torch.tensor({value!r}))."
            )
        value = checked(value, record.components[replica.local_replica_id], self.name)

        def write(given: list[tuple[torch.Tensor, Share | None]]) -> list[None]:
            values, shares = zip(*given, strict=True)
            write_all(record, op, combine(record, values, shares))
            return [None] * len(values)

        replica.barrier(f"{op} of variable {self.name!r}", (value, replica.share), write)

    def _assign_in_cross_replica_context(self, op: str, value: Any) -> Any:
        record = self._tfstyle_record
        first, on_read = record.components[0], record.synchronization is VariableSynchronization.ON_READ
        count = len(record.copies())
        values = [checked(v, first, self.name) for v in per_component(value, count)[:count]]
        if not on_read:
            if len({id(v) for v in values}) > 1:
                for component, part in zip(record.components, values, strict=True):
                    write_component(component, op, part)
            else:
                write_all(record, op, values[0])
            return self
        if record.aggregation is VariableAggregation.SUM:
            if op != "assign":
                raise ValueError(
                    f"{op} of ON_READ variable {self.name!r} with aggregation SUM is not defined in cross-replica "
                    "context: each replica holds a part of the sum. Call it inside strategy.run, or use assign."
                )
            count = record.store.worker.num_replicas
            values = [v / count if v.is_floating_point() or v.is_complex() else v // count for v in values]
        for component, part in zip(record.components, values, strict=True):
            write_component(component, op, part)
        return read_across_replicas(record, self.name)


class DistributedVariable(DistributedValues, Variable):  # type: ignore[misc]  # Tensor._values is for sparse tensors
    """A variable with copies on the replicas of a strategy."""

    @property
    def is_distributed_variable(self) -> bool:
        """Always true: what tells it from other variables, as in TensorFlow."""
        return True

    @property
    def values(self) -> tuple[Any, ...]:  # type: ignore[override]  # Tensor.values() is for sparse tensors
        """The copies of this worker's replicas; the one copy under central storage."""
        self._tfstyle_record.store.ensure_equal()
        return tuple(self._tfstyle_record.copies())
