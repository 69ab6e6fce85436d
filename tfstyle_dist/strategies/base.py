"""``tf.distribute.Strategy``: one hierarchy; each strategy says where variables live and how values are summed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.core import env
from tfstyle_dist.core.devices import ReplicaDevice, any_accelerator
from tfstyle_dist.core.errors import WrongContextError
from tfstyle_dist.core.list_writes import list_writes, list_writes_on_accelerators
from tfstyle_dist.core.process_hooks import CountedUsers, install_for
from tfstyle_dist.cross_device_ops import CrossDeviceOps
from tfstyle_dist.cross_device_ops.collective import sum_into
from tfstyle_dist.gradients.backward_calls import engine_calls
from tfstyle_dist.gradients.drift_between_workers import DriftBetweenWorkers
from tfstyle_dist.gradients.exchanges.host_memory import InMemoryReducer
from tfstyle_dist.gradients.exchanges.overlapped import StreamingReducer
from tfstyle_dist.gradients.exchanges.replicas import ReplicaReducer
from tfstyle_dist.gradients.optimizer_step import UpdateRunner
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.gradients.step_hooks import step_hooks
from tfstyle_dist.monitoring import Monitor, Report
from tfstyle_dist.ops.host_sums import find_host_sum
from tfstyle_dist.runtime.context import current_replica, mixing_error, replica_of
from tfstyle_dist.strategies import inputs, reductions, running, training
from tfstyle_dist.strategies.absent_names import AbsentNames
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.scope import Scope, scope_in_replica_context
from tfstyle_dist.strategies.sync_batch_norm import sync_batch_norms
from tfstyle_dist.variables import ParameterStore, Variable
from tfstyle_dist.variables.adoption import registrations
from tfstyle_dist.variables.creation import VariableSpec

if TYPE_CHECKING:
    from tfstyle_dist.strategies.elastic import ElasticSteps


class Strategy(AbsentNames):
    """State and policy of one way to distribute training (``tf.distribute.Strategy``).

    Use a subclass. A strategy is a context manager: leaving it, or ``close()``, ends its threads and leaves its group.

    Args:
        extended: the facade made by the subclass; it carries the worker and the cross-device ops.
        communication_options: of the group.
        parameter_device: where all values live under central storage.

    Attributes:
        worker: local replicas and the group of workers.
        monitor: counts where the time of the steps goes; see ``report``.
        parameter_store: the parameters, buffers and variables it owns.
        closed: whether ``close`` was called.
        first_replica_is_global: whether ONLY_FIRST_REPLICA means replica 0 of all workers.
        distributes: whether it is made for several replicas, though it may have one; else values stay as they are, and
            anything can be updated.
    """

    first_replica_is_global = True
    distributes = True
    _elastic_steps: ElasticSteps | None = None
    _resolver: Any = None

    def __init__(
        self,
        extended: StrategyExtended,
        *,
        communication_options: CommunicationOptions | None = None,
        parameter_device: ReplicaDevice | None = None,
    ) -> None:
        self._extended = extended
        self.worker = extended.worker
        self.monitor = Monitor(self.worker, env.monitor() and bool(self.worker.devices))
        self.cross_device_ops = extended.cross_device_ops or CrossDeviceOps()
        self.communication_options = communication_options or CommunicationOptions()
        self.worker.group.use_summation(sum_into, find_host_sum)
        self.parameter_store = ParameterStore(self, self.worker, parameter_device)
        self.gradient_reducer: GradientReducer | None = None
        self.update_runner: UpdateRunner | None = None
        self.closed = False
        extended.bind(self)
        if self.parameter_store.adopts:
            self.gradient_reducer = self.make_reducer()
            self.parameter_store.on_adopt = self.gradient_reducer.attach
            self.update_runner = self.make_update_runner()
            hooks: list[CountedUsers] = [step_hooks, registrations, engine_calls, sync_batch_norms, list_writes]
            hooks += [list_writes_on_accelerators] if any_accelerator() else []
            if self.parameter_store.contents is not None:
                hooks.append(self.parameter_store.contents.data_reads)
            self._uninstall_hooks = install_for(self, hooks)

    def make_reducer(self) -> GradientReducer:
        """What makes the gradients of plain optimizers the same on all replicas."""
        reducer = self._reducer_class()(
            self.worker,
            self.parameter_store,
            self.communication_options.bytes_per_pack,
            self.cross_device_ops.aggregation_method,
        )
        reducer.own_sum = self.cross_device_ops.own_sum
        reducer.drift = DriftBetweenWorkers(self.worker, self.parameter_store) if self.worker.group.size > 1 else None
        return reducer

    def make_update_runner(self) -> UpdateRunner:
        """Who runs the step of plain optimizers."""
        return UpdateRunner(self)

    def _reducer_class(self) -> type[GradientReducer]:
        if self.parameter_store.contents is not None:
            return ReplicaReducer
        shared = self.worker.group.shares_memory(torch.float32, self.worker.torch_device(0))
        return InMemoryReducer if shared else StreamingReducer

    # ---- facts ------------------------------------------------------------------------------------------------

    @property
    def extended(self) -> StrategyExtended:
        """The seldom needed rest of the interface."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers that work in step."""
        return self.worker.num_replicas

    @property
    def cluster_resolver(self) -> Any:
        """Who the workers are, as given or found; ``None`` for a strategy that was not made from a cluster."""
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker, and in replica context the replica, that prints and writes files.

        It is worker 0, and there the first replica; in an elastic job the live worker with the lowest number.
        """
        replica = replica_of(self)
        return (
            self.worker.group.rank == 0
            and self.worker.group.leads
            and (replica is None or replica.local_replica_id == 0)
        )

    def print(self, *values: Any, **kwargs: Any) -> None:
        """``print`` once: where ``is_chief`` is true. Works in every context; no communication.

        Args:
            *values: as for the built-in ``print``.
            **kwargs: as for the built-in ``print``.
        """
        if self.is_chief:
            print(*values, **kwargs)

    @property
    def adopts_modules(self) -> bool:
        """Whether modules built in the scope are taken over; one replica that keeps its own values needs nothing."""
        return self.parameter_store.adopts

    @property
    def watches_modules(self) -> bool:
        """Whether what modules register in the scope is taken over, or put on the strategy's device."""
        return self.adopts_modules or self.parameter_store.places

    # ---- training ---------------------------------------------------------------------------------------------

    run, _run = running.run, running.run_counted
    experimental_distribute_dataset = inputs.experimental_distribute_dataset
    distribute_datasets_from_function = inputs.distribute_datasets_from_function
    experimental_distribute_datasets_from_function = inputs.experimental_distribute_datasets_from_function
    experimental_make_numpy_dataset = inputs.experimental_make_numpy_dataset
    make_dataset_iterator = inputs.make_dataset_iterator
    make_input_fn_iterator = inputs.make_input_fn_iterator
    experimental_run = inputs.experimental_run
    experimental_adopt = training.experimental_adopt
    sync_buffers = training.sync_buffers
    should_stop = training.should_stop
    accumulate = training.accumulate
    set_gradient_policy = training.set_gradient_policy
    seed_replicas = training.seed_replicas

    # ---- contexts ---------------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[Strategy]:
        """A context manager that puts this strategy in force, in cross-replica context.

        Parameters and buffers of modules, and ``Variable`` objects, built inside belong to the strategy.

        Raises:
            RuntimeError: called in replica context, or while another strategy is in force.

        Example:
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(2, 1)
        """
        replica = current_replica()
        if replica is not None:
            if replica.strategy is not self:
                raise mixing_error(self, replica.strategy, "scope()")
            raise scope_in_replica_context(self)
        return Scope(self)

    def require_cross_replica_context(self, what: str, instead: str) -> None:
        """Raises RuntimeError when this thread is in this strategy's replica context.

        Args:
            what: the call that was made.
            instead: what to call in replica context.
        """
        if current_replica() is not None:
            raise WrongContextError(
                f"{what} must be called in cross-replica context, not in replica context (inside strategy.run). "
                f"Use {instead}."
            )

    # ---- values -----------------------------------------------------------------------------------------------

    reduce = reductions.reduce
    gather = reductions.gather
    experimental_local_results = reductions.experimental_local_results
    unwrap = reductions.unwrap
    experimental_distribute_values_from_function = inputs.experimental_distribute_values_from_function

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """The older place of ``extended.colocate_vars_with``."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    # ---- variables, parameters, gradients ---------------------------------------------------------------------

    def create_variable(self, spec: VariableSpec) -> Variable:
        """Makes the variable that ``Variable(...)`` asks for under this strategy."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it makes variables")

    def report(self, function: str | None = None, *, quiet: bool = False) -> Report:
        """Says where the time of a training step goes, and what keeps it from scaling.

        Collective over the workers: all call it at the same place, in cross-replica context; the chief prints.

        Args:
            function: of which function that ``run`` was given; default: the one that took the most time.
            quiet: whether nothing is printed.

        Returns:
            The numbers of all replicas, the same on all workers; ``report.plot("steps.png")`` draws them.

        Raises:
            RuntimeError: called in replica context.
            ValueError: a function that was not run twice.

        Example:
            >>> for batch in batches:
            ...     strategy.run(train_step, args=batch)
            >>> report = strategy.report()
        """
        self.require_cross_replica_context("Strategy.report", "it after strategy.run")
        report = self.monitor.report(function)
        if not quiet:
            self.print(report)
        return report

    # ---- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the replica threads and leaves the group; a second call does nothing.

        ``run`` raises afterwards; variables and modules keep their values. Each worker closes for itself: what the
        others still call together raises there. Not to be called in replica context.
        """
        if self.closed:
            return
        self.closed = True
        if self.update_runner is not None:
            self._uninstall_hooks()
        self.worker.close()

    def __enter__(self) -> Strategy:
        """Returns the strategy; ``with`` closes it at the end (it does not enter the scope)."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes."""
        self.close()

    def __copy__(self, memo: Any = None) -> Strategy:
        """A strategy is one thing: a copy is the same object."""
        return self

    __deepcopy__ = __copy__
    __reduce__ = running.refuse_pickling

    def __repr__(self) -> str:
        devices = ", ".join(str(d) for d in self.worker.devices)
        workers = f", worker {self.worker.group.rank} of {self.worker.group.size}" if self.worker.group.size > 1 else ""
        return f"<{type(self).__name__} on [{devices}]{workers}>"
