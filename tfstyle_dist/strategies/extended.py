"""``tf.distribute.StrategyExtended``: the seldom needed rest of the interface, over the same object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.core.devices import made_current
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops import CrossDeviceOps
from tfstyle_dist.cross_device_ops.base import check_pairs, place
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies import absent_names, reductions
from tfstyle_dist.strategies.arguments import check_arguments
from tfstyle_dist.values import DistributedValues, IndexedSlices, Mirrored, regroup, select_replica
from tfstyle_dist.variables import Record, Variable, VariableComponent, find_record

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


class StrategyExtended(absent_names.AbsentExtendedNames):
    """Additional methods of a strategy, for library writers (``tf.distribute.StrategyExtended``).

    Args:
        worker: the local replicas and the group.
        cross_device_ops: how local values are summed.
    """

    def __init__(self, worker: Worker, cross_device_ops: CrossDeviceOps | None = None) -> None:
        self.worker, self.cross_device_ops = worker, cross_device_ops
        self._strategy: Strategy | None = None

    def bind(self, strategy: Strategy) -> None:
        """Ties the facade to its strategy; called once, by ``Strategy.__init__``."""
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        assert self._strategy is not None
        return self._strategy

    # ---- devices ----------------------------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this worker's replicas.

        Raises:
            RuntimeError: the default strategy has none.
        """
        return self._devices()

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices on which variables live."""
        home = self.strategy.parameter_store.parameter_device
        return self._devices() if home is None else (str(home),)

    def _devices(self) -> tuple[str, ...]:
        if not self.worker.devices:
            raise RuntimeError("worker_devices is unsupported by the default strategy: it has no devices of its own.")
        return tuple(str(d) for d in self.worker.devices)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all batches must have one shape (TPUs): no."""
        return False

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Where an optimizer's state that belongs to no variable lives: on all devices of this worker.

        Args:
            var_list: accepted for TF's signature.

        Raises:
            RuntimeError: the default strategy has no devices.
        """
        return self._devices()

    # ---- reducing ---------------------------------------------------------------------------------------------

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduces ``value`` over all replicas and puts copies where ``destinations`` says.

        Args:
            reduce_op: SUM or MEAN, or the name in any case.
            value: a ``PerReplica``; with MEAN also a value that is the same everywhere.
            destinations: a variable or ``PerReplica`` (the result is ``Mirrored``), or one device string.
            options: accepted for TF's signature.

        Returns:
            The result on each of ``destinations``; with one replica the value as it is.

        Raises:
            RuntimeError: called in replica context.
            ValueError: an unknown op, a value that cannot be reduced, or ``destinations`` is ``None``.

        Example:
            >>> strategy.extended.reduce_to("SUM", per_replica_losses, "cpu:0")
            tensor(1.)
        """
        self.strategy.require_cross_replica_context("extended.reduce_to", "merge_call, or ReplicaContext.all_reduce")
        op = ReduceOp.from_any(reduce_op)
        total = reductions.reduce_leaf(self.strategy, op, value)
        placed = isinstance(total, torch.Tensor | IndexedSlices | int | float)
        return place(total, destinations) if placed and self.strategy.num_replicas_in_sync > 1 else total

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """``reduce_to`` for several values.

        Args:
            reduce_op: as for ``reduce_to``.
            value_destination_pairs: a list or tuple of ``(value, destinations)``.
            options: accepted for TF's signature.

        Returns:
            One result for each pair, in a list.

        Raises:
            RuntimeError: called in replica context.
            TypeError: ``value_destination_pairs`` is no list or tuple.
            ValueError: it is empty, one of its entries is no pair, or ``reduce_to`` refuses one.
        """
        self.strategy.require_cross_replica_context("extended.batch_reduce_to", "merge_call")
        check_pairs(value_destination_pairs)
        if not value_destination_pairs:
            raise ValueError("batch_reduce_to got no pairs; give at least one (value, destinations).")
        return [self.reduce_to(reduce_op, value, where, options) for value, where in value_destination_pairs]

    def broadcast_to(self, tensor: torch.Tensor, destinations: Any) -> Any:
        """Copies of this worker's tensor where ``destinations`` says; nothing is sent to other workers.

        Args:
            tensor: a tensor, number or ``IndexedSlices``.
            destinations: a variable or ``PerReplica`` (the result is ``Mirrored``), or one device string.

        Returns:
            The copies.

        Raises:
            RuntimeError: called in replica context.
            ValueError: ``destinations`` is ``None``.

        Example:
            >>> strategy.extended.broadcast_to(torch.tensor(1.0), "cpu:0")
            tensor(1.)
        """
        self.strategy.require_cross_replica_context("extended.broadcast_to", "merge_call")
        return place(tensor, destinations)

    # ---- variables --------------------------------------------------------------------------------------------

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn`` on every copy of a variable: ``fn(component, *args, **kwargs)``.

        Args:
            var: a variable or parameter of this strategy.
            fn: gets one copy; ``PerReplica`` arguments arrive as that replica's own entry.
            args: positional arguments.
            kwargs: keyword arguments.
            group: regroup the results into one value; else a tuple with one result per copy.

        Returns:
            What ``fn`` returned, regrouped over the copies, or the tuple.

        Raises:
            InvalidArgumentError: ``var`` is no variable of this strategy; ``OneDeviceStrategy`` and the default one
                pass on anything.

        Example:
            >>> strategy.extended.update(variable, lambda copy, x: copy.assign_add(x), args=(1.0,))
        """
        args, kwargs = check_arguments(fn, args, kwargs, "extended.update")
        if not self.strategy.distributes or self._stays_itself(var):
            results = self._called(fn, [(var,)], args, kwargs)
            return results[0] if group else tuple(results)
        record = self._own(var, "extended.update")
        record.store.ensure_equal()
        record.store.settle()
        results = self._called(fn, [(component,) for component in record.copies()], args, kwargs)
        return regroup(results, "results of update", Mirrored) if group else tuple(results)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(*args, **kwargs)`` once for each local replica, in update context.

        Args:
            colocate_with: accepted for TF's signature; what ``non_slot_devices`` returned.
            fn: gets the arguments; those that are ``PerReplica`` arrive as that replica's own entry.
            args: positional arguments.
            kwargs: keyword arguments.
            group: regroup the results into one value; else a tuple with one result per replica.

        Returns:
            What ``fn`` returned, regrouped over the replicas, or the tuple.
        """
        args, kwargs = check_arguments(fn, args, kwargs, "extended.update_non_slot")
        results = self._called(fn, [()] * self.worker.num_local_replicas, args, kwargs)
        return regroup(results, "results of update_non_slot") if group else tuple(results)

    def _called(self, fn: Any, first: Sequence[tuple[Any, ...]], args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """What a function returns for each replica, in update context; ``first``: each one's first arguments."""
        results = []
        for replica, own in enumerate(first):
            device = self.strategy.parameter_store.parameter_device or self.worker.torch_device(replica)
            with entered(Frame(self.strategy, component=replica)), made_current(device):
                results.append(fn(*own, *select_replica(replica, tuple(args)), **select_replica(replica, kwargs)))
        return results

    def value_container(self, value: Any) -> Any:
        """The variable that a component (a copy, as ``update`` gives to its function) belongs to; else ``value``."""
        if isinstance(value, DistributedValues):
            return value
        record = find_record(value)
        return value if record is None or record.tensor is None else record.tensor

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether variable ``v`` was created while this strategy was in force.

        Raises:
            AttributeError: ``v`` is no variable.
        """
        if not isinstance(v, torch.Tensor):
            raise AttributeError(f"variable_created_in_scope takes a variable, got {type(v).__name__}.")
        record = find_record(v)
        if record is None:  # one replica that needs nothing adopts no parameter
            return not self.strategy.adopts_modules and isinstance(v, torch.nn.Parameter)
        return record.store is self.strategy.parameter_store

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """A context manager that checks a variable; those created inside live where they do without it.

        All variables of a strategy live on the same devices, so that there is nothing to move.

        Args:
            colocate_with_variable: a variable or parameter of this strategy.

        Raises:
            ValueError: the variable was not created in this strategy's scope.
        """
        given = colocate_with_variable
        if not isinstance(given, torch.Tensor) or not self.variable_created_in_scope(given):
            raise ValueError(
                f"colocate_vars_with must be given a variable created in the scope of {self.strategy!r}; "
                "`colocate_with_variable` belongs to another strategy or to none."
            )
        yield

    def _stays_itself(self, var: Any) -> bool:
        """Whether ``var`` is a variable or parameter that the one replica there is uses as it is, without copies."""
        if self.strategy.num_replicas_in_sync > 1 or isinstance(var, DistributedValues):
            return False
        if not isinstance(var, torch.nn.Parameter):
            return False
        record = find_record(var)  # one replica that needs nothing adopts no parameter: it has no record
        return record is None or record.store is self.strategy.parameter_store

    def _own(self, var: Any, what: str) -> Record:
        record = find_record(var) if isinstance(var, Variable | torch.nn.Parameter) else None
        if record is None or record.store is not self.strategy.parameter_store:
            raise InvalidArgumentError(
                f"{what} can not update this: it takes a variable or parameter of {self.strategy!r}, got "
                f"{type(var).__name__}"
                + (" of another strategy" if record is not None else "")
                + ". Create it inside strategy.scope()."
            )
        if isinstance(var, VariableComponent):
            raise InvalidArgumentError(
                f"{what} takes the variable, not one of its copies; use extended.value_container(copy)."
            )
        return record
