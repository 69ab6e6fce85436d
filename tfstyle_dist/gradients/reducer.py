"""What all ways of reducing gradients share: hooks, accumulation, and by what a sum is divided.

``GradientReducer.divisor`` says it: the number of replicas for MEAN, nothing for SUM. Where several passes accumulate,
only the new part is summed. ``exchanges`` start the sums, and whoever makes the last addition divides: in one process
``ops.aggregate``, in memory that workers share ``bucket_views`` (or the compiled sum, ``comm/host_memory``), after a
transport ``exchanges/overlapped.py``, for workers of several replicas ``exchanges/replicas.py``, on XLA devices
``exchanges/xla.py``; sparse gradients between workers ``reduce_sparse`` below.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import AggregationMethod, ReduceOp
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.cross_device_ops.collective import OwnSum, sparse_sum_over_workers
from tfstyle_dist.gradients.buckets import ReductionPlan
from tfstyle_dist.gradients.drift_between_workers import DriftBetweenWorkers
from tfstyle_dist.runtime.context import replica_of
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.store import ParameterStore


class GradientState:
    """State of one copy of one parameter during training.

    Attributes:
        record: the parameter.
        replica: local number of the replica.
        ready: a gradient came in this backward pass.
        dirty: has a gradient that was accumulated without reduction; one that ``zero_grad()`` dropped is none.
        before: the gradient as it was before this backward pass; only kept for SUM.
    """

    __slots__ = ("__weakref__", "_accumulated", "before", "ready", "record", "replica", "watches_before")

    def __init__(self, record: Record, replica: int) -> None:
        self.record, self.replica = record, replica
        self.ready = self._accumulated = self.watches_before = False
        self.before: torch.Tensor | None = None

    @property
    def dirty(self) -> bool:
        """Whether the copy's gradient is, in part, of passes that were not reduced."""
        self._accumulated = self._accumulated and self.holds()
        return self._accumulated

    @dirty.setter
    def dirty(self, accumulated: bool) -> None:
        self._accumulated = accumulated

    def holds(self) -> bool:
        """Whether the copy has a gradient. One that autograd left undefined, or ``zero_grad()`` dropped, is none."""
        return self.record.tensor is not None and self.record.components[self.replica].grad is not None


class GradientReducer(abc.ABC):
    """Reduces the gradients of adopted parameters by the end of ``backward()``.

    Args:
        worker: replicas and group.
        store: the parameters.
        bytes_per_pack: size of a bucket; 0 chooses.
        method: an ``AggregationMethod``.

    Attributes:
        own_sum: what sums in this process in the place of ``method``, if the user defined it.
        drift: compares the workers' parameters, if each has its own.
        accumulated: whether a gradient may ever have been accumulated without reduction.
        summed: by ``id``, the records whose gradients a pass of local replicas has summed since an optimizer stepped.
        meets_in_backward: whether the replicas have met in a backward pass, e.g. in the gradient of an ``all_reduce``.
            Buckets are then kept until its end: workers that use different parameters would send them before and
            after such a meeting, and their libraries know calls by their order alone.
    """

    own_sum: OwnSum | None = None
    drift: DriftBetweenWorkers | None = None
    accumulated = meets_in_backward = False

    def __init__(
        self, worker: Worker, store: ParameterStore, bytes_per_pack: int = 0, method: int = AggregationMethod.DEFAULT
    ) -> None:
        self.worker, self.store, self.bytes_per_pack = worker, store, bytes_per_pack
        self.method = AggregationMethod.validate(method)
        self.states: dict[int, list[GradientState]] = {}
        self.summed: set[int] = set()
        self._accumulating = [0] * worker.num_local_replicas
        self._plan: ReductionPlan | None = None
        self._plan_version = self._clean_version = -1

    # ---- hooks ------------------------------------------------------------------------------------------------

    def attach(self, record: Record) -> None:
        """Watches the gradients of a newly adopted parameter. Frozen ones are watched too: they may thaw."""
        states = []
        for replica, component in enumerate(record.components):
            if not (component.is_floating_point() or component.is_complex()):
                return
            state = GradientState(record, replica)
            states.append(state)
            _hook(component, component.register_post_accumulate_grad_hook, self._listener(state))
        self.forget_dead(at_once=False)
        self.states[id(record)] = states
        if record.policy is not None and record.policy.scale is ReduceOp.SUM:
            self.watch_before(record)

    def _listener(self, state: GradientState) -> Callable[[torch.Tensor], None]:
        """What the copy's hook calls. The garbage collector does not see through torch's hook: it holds nothing."""
        reducer, known = weakref.ref(self), weakref.ref(state)

        def listen(parameter: torch.Tensor) -> None:
            me, mine = reducer(), known()
            if me is not None and mine is not None:
                me.on_gradient(parameter, mine)

        return listen

    def watch_before(self, record: Record) -> None:
        """For SUM: remembers the gradient before each backward pass, so that only the new part is summed."""
        for state in self.states.get(id(record), ()):
            if state.watches_before:
                continue
            state.watches_before = True

            def remember(_: torch.Tensor, state: GradientState = state) -> None:
                self.remember_before(state)

            component = record.components[state.replica]
            _hook(component, component.register_hook, remember)

    def remember_before(self, state: GradientState) -> None:
        """Keeps the gradient that is there already, once in a pass, if its parameter is summed."""
        grad = state.record.components[state.replica].grad
        if state.watches_before and (grad is None or not (state.dirty or self.in_same_pass(state))):
            state.before = None if grad is None else grad.detach().clone()

    @abc.abstractmethod
    def in_same_pass(self, state: GradientState) -> bool:
        """Whether a gradient of this copy came in the backward pass under way."""

    def state(self, record: Record, replica: int) -> GradientState:
        """The state of one copy."""
        return self.states[id(record)][replica]

    @abc.abstractmethod
    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        """Called by autograd after a gradient was accumulated into ``parameter.grad``."""

    # ---- accumulation -----------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, gradients stay local; the first backward after it reduces the whole."""
        replica = replica_of(self.store.strategy)
        # Replicas in threads enter and leave at their own time: each counts for itself.
        self.accumulated = True
        inside = range(len(self._accumulating)) if replica is None else (replica.local_replica_id,)
        for index in inside:
            self._accumulating[index] += 1
        try:
            yield
        finally:
            for index in inside:
                self._accumulating[index] -= 1

    def keeps_local(self, state: GradientState) -> bool:
        """Whether this gradient is not to be reduced now; remembers it if so."""
        policy = state.record.policy
        if policy is None or policy.reduce_at != "backward":
            return True
        if self._accumulating[state.replica]:
            state.dirty = state.holds()
            return True
        return False

    def check_reduced(self, records: Sequence[Record], replica: int) -> None:
        """Raises RuntimeError when an optimizer is about to apply gradients that were never reduced."""
        for record in records if self.accumulated else ():
            states = self.states.get(id(record))
            if states is None or not states[replica].dirty:
                continue
            raise RuntimeError(
                "optimizer.step() would apply gradients that were accumulated in strategy.accumulate() and never "
                f"reduced (parameter {record.describe()!r}): the replicas would drift apart. Run the last backward() "
                "of the step outside accumulate()."
            )

    def forget_dead(self, at_once: bool = True) -> None:
        """Drops the state of parameters that are gone: after any adoption, or after as many as there are states."""
        adopted = self.store.version - self._clean_version
        if adopted and (at_once or 2 * adopted > len(self.states)):
            self._clean_version = self.store.version
            self.states = {key: s for key, s in self.states.items() if s[0].record.tensor is not None}

    # ---- helpers ----------------------------------------------------------------------------------------------

    def plan(self) -> ReductionPlan:
        """The current plan; built anew after parameters were adopted."""
        if self._plan is None or self._plan_version != self.store.version:
            self.forget_dead()
            records = self.store.alive_everywhere(r for r in self.store.records() if id(r) in self.states and r.leads)
            self._plan = ReductionPlan.build(records, self.bytes_per_pack, self.method)
            self._plan_version = self.store.version
        return self._plan

    def contribution(self, state: GradientState) -> torch.Tensor | None:
        """What one copy adds to the sum: for MEAN its whole gradient, for SUM only the part that is new.

        The mean of gradients that all hold the same old part plus different new ones is the old part plus the mean of
        the new ones, so MEAN needs no memory of the old part. A parameter that is gone adds nothing.
        """
        held = state.record.tensor
        if held is None:
            return None
        grad = state.record.components[state.replica].grad
        if grad is None or state.record.policy is None or state.record.policy.scale is ReduceOp.MEAN:
            return grad
        if not state.ready and not state.dirty:
            return None
        return grad if state.before is None else grad - state.before

    def worker_part(self, state: GradientState) -> torch.Tensor | None:
        """What a worker of one replica adds to the sum: the copy's contribution, as the user sums it."""
        part = self.contribution(state)
        return part if part is None or self.own_sum is None else self.own_sum([part])

    def old_part(self, state: GradientState) -> torch.Tensor | None:
        """What was reduced in earlier passes and is to be added to the sum of the new parts; ``None`` for MEAN."""
        if self.divisor(state.record) is not None:
            return None
        if state.ready or state.dirty:
            return state.before
        grad = state.record.components[state.replica].grad
        return None if grad is None else grad.detach()

    def divisor(self, record: Record) -> int | None:
        """By what the sum is divided."""
        mean = record.policy is None or record.policy.scale is ReduceOp.MEAN
        return self.worker.num_replicas if mean else None

    def settle(self, state: GradientState) -> None:
        """Forgets the pass: the copy's gradient is now the reduced one."""
        state.ready = state.dirty = False
        state.before = None

    def reduce_sparse(self, state: GradientState, empty: torch.Tensor, keep: bool = True) -> None:
        """Sums a sparse gradient over the workers, where each has one replica, into ``.grad``.

        Args:
            state: whose gradient; it may have none.
            empty: a sparse gradient without rows.
            keep: ``False``: the pass was broken off, so nothing is given or taken; the others wait for this call.
        """
        part = self.worker_part(state) if keep else None
        if part is None:
            part = empty
        elif not part.is_sparse:
            part = part.to_sparse(1)
        total = sparse_sum_over_workers(self.worker, part, f"rows of {state.record.local_name!r}")
        parameter = state.record.tensor
        if parameter is None or not keep:
            return  # the other workers needed our part all the same
        divisor = self.divisor(state.record)
        total = total if divisor is None else total / divisor
        old = self.old_part(state)
        if old is not None:
            total = (total + old).coalesce()
        if torch_internals.entries_of(total) > 0 or parameter.grad is not None:
            parameter.grad = total
        self.settle(state)

    def say_unused(self, records: Sequence[Record]) -> None:
        """Names, once, parameters that only some replicas used."""
        if records:
            warn_once(
                f"unused {id(self)}",
                f"Parameters without a gradient on some replica count as zero there: {self.store.names_of(records)}.",
            )


def has_further_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks for its accumulated gradient beside the strategy's own; they may write to it."""
    return len(torch_internals.hooks_of(parameter)[1] or ()) > 1


def _hook(component: torch.Tensor, register: Callable[[Any], Any], function: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook; on a frozen parameter too, in case it thaws."""
    trains = component.requires_grad
    component.requires_grad_(True)
    register(function)
    component.requires_grad_(trains)
