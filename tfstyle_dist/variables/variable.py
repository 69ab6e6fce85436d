"""``tf.Variable`` on PyTorch: every synchronization x aggregation, in every context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.runtime.context import current_frame, current_replica
from tfstyle_dist.values import DistributedValues
from tfstyle_dist.variables.assigning import assign, write_of_operator
from tfstyle_dist.variables.component import read_across_replicas
from tfstyle_dist.variables.content.common_objects import in_elastic_job
from tfstyle_dist.variables.creation import VariableSpec, copy_variable, default_creator
from tfstyle_dist.variables.read_without_graph import note_read
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.replicated import Replicated
from tfstyle_dist.variables.rows import RowMethods
from tfstyle_dist.variables.scatter import read_places, read_rows, scatter
from tfstyle_dist.variables.value_methods import ValueMethods


class Variable(RowMethods, ValueMethods, Replicated, torch.nn.Parameter):  # type: ignore[misc]  # __repr__ differs from the stub
    """A tensor that a strategy keeps on its replicas (``tf.Variable``).

    Built inside ``strategy.scope()`` it has one copy on each replica; outside every scope it is an ordinary
    variable. It is a ``torch.nn.Parameter``: use it in any torch expression, give it to an optimizer, register it in a
    module. In replica context an expression reads the replica's own copy.

    Args:
        initial_value: a number, nested list, array or tensor, or a function without arguments that returns one; the
            first worker's value counts.
        trainable: whether it takes gradients; default: yes, but no for ``ON_READ`` and for integers.
        name: for messages and checkpoints; copies are called ``name``, ``name/replica_1``, ...
        dtype: element type, also its name or numpy's; default: the tensor's own, float32 for Python floats. A tensor of
            another type is converted (TensorFlow refuses it), but floating numbers are not cut off to integers.
        constraint: called with the value after a ``train`` optimizer has updated it, returns the value to keep, e.g. of
            a norm of at most 1; ``assign`` and optimizers of ``torch.optim``, also in ``train.Optimizer``, do not call
            it (of the latter a warning says so).
        synchronization: when the copies are made equal.
        aggregation: how values written by the replicas combine; so do those of ``v += x`` and ``v -= x``, but other
            operations in place (``v.mul_(x)``, ``v[0] = x``) change the replica's own copy alone.
        shape: what the initial value must fit, ``None`` for any size; the variable keeps the initial value's.

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
        dtype: torch.dtype | str | type[Any] | None = None,
        constraint: Callable[[torch.Tensor], torch.Tensor] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: int | Sequence[int | None] | None = None,
    ) -> Variable:
        """Builds what the strategy in force makes of it."""
        if not isinstance(synchronization, VariableSynchronization):
            raise ValueError(
                f"synchronization must be a VariableSynchronization, got {synchronization!r}; write e.g. "
                "VariableSynchronization.ON_READ."
            )
        if not isinstance(aggregation, VariableAggregation):
            raise ValueError(
                f"aggregation must be a VariableAggregation, got {aggregation!r}; write e.g. VariableAggregation.SUM."
            )
        if constraint is not None and not callable(constraint):
            raise ValueError(f"Argument `constraint` must be None or a callable, got {constraint!r}.")
        frame = current_frame()
        spec = VariableSpec(initial_value, trainable, name, dtype, synchronization, aggregation, constraint, shape)
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
        """The value in the calling context, a new tensor that takes no gradients; ``read_value`` is the same.

        A loss is computed from the variable itself.

        In replica context it is that of the replica's own copy. Elsewhere it is the first copy's; of an ``ON_READ``
        variable the copies of all replicas combine by ``aggregation``, which is collective over the workers.

        Raises:
            ValueError: a cross-replica read of an ``ON_READ`` variable with aggregation ``NONE``.

        Example:
            >>> Variable([1.0, 2.0]).value()
            tensor([1., 2.])
        """
        if self.trainable:
            note_read(self._tfstyle_record)
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

        Example:
            >>> Variable([10.0, 20.0, 30.0]).sparse_read([2, 0]).tolist()
            [30.0, 10.0]
        """
        return read_rows(self._tfstyle_value(), indices, self.name)

    def gather_nd(self, indices: Any, name: str | None = None) -> torch.Tensor:
        """``value[indices[..., 0], indices[..., 1], ...]``, differentiable; TensorFlow's mirrored variables lack it.

        Args:
            indices: int places; the last dimension holds the numbers of one place, or of one row.
            name: accepted for TF's signature.

        Returns:
            A tensor of shape ``indices.shape[:-1]`` and what is left of the variable's.

        Raises:
            InvalidArgumentError: a place that does not exist.

        Example:
            >>> Variable([[1.0, 2.0], [3.0, 4.0]]).gather_nd([[0, 1], [1, 0]]).tolist()
            [2.0, 3.0]
        """
        return read_places(self._tfstyle_value(), indices, self.name)

    # ---- writing ----------------------------------------------------------------------------------------------

    def __iadd__(self, value: Any) -> Any:  # type: ignore[misc]
        """``assign_add`` where that combines the replicas' values, else as in torch; TensorFlow refuses it."""
        return self if write_of_operator(self, "assign_add", value) else super().__iadd__(value)

    def __isub__(self, value: Any) -> Any:  # type: ignore[misc]
        """``assign_sub`` where that combines the replicas' values, else as in torch; TensorFlow refuses it."""
        return self if write_of_operator(self, "assign_sub", value) else super().__isub__(value)

    def _tfstyle_scatter(self, op: str, sparse_delta: Any) -> Any:
        return scatter(self, op, sparse_delta)

    def _assign(self, op: str, value: Any) -> Any:
        try:
            return self._assign_in_context(op, value)
        finally:
            self._tfstyle_record.changes += 1

    def _assign_in_context(self, op: str, value: Any) -> Any:
        return assign(self, op, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A variable of the same strategy, as in TensorFlow.

        In replica context, of servers, and where there are several workers, of which one alone may copy, it is a plain
        parameter.
        """
        record = self._tfstyle_record
        several = not record.store.worker.group.alone or in_elastic_job(record.store)
        if several or record.placement is Placement.REMOTE or current_replica() is not None:
            return super().__deepcopy__(memo)
        if id(self) not in memo:
            self._tfstyle_record.store.ensure_equal()
            memo[id(self)] = copy_variable(self)
        copy: Variable = memo[id(self)]
        return copy

    def _tfstyle_plain(self) -> bool:
        """Whether this is an ordinary variable, without policies."""
        return not isinstance(self, DistributedVariable)


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
