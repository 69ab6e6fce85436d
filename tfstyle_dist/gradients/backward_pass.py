"""One replica per process: when a backward pass begins and ends."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.program_line import stack_from
from tfstyle_dist.gradients.over_workers import AllReduce, over_workers, sum_graphs
from tfstyle_dist.gradients.reducer import GradientReducer, GradientState
from tfstyle_dist.runtime.context import Replica
from tfstyle_dist.variables.record import Living


class PassReducer(GradientReducer):
    """Tells the gradients of one backward pass from those of the next.

    A backward that is started from within another one (reentrant checkpointing) belongs to it.
    """

    _pass = 0
    _graphs: dict[int, GradientState] | None = None
    _active = False
    _task = -1

    def enter(self, state: GradientState) -> bool:
        """Notes that a gradient has come; begins a pass with the first one.

        Args:
            state: whose gradient.

        Returns:
            Whether it is to be reduced.
        """
        if self._graphs is not None:
            if state.holds():
                self._graphs[id(state)] = state
            return False
        if self.keeps_local(state):
            return False
        task = torch_internals.backward_pass_under_way()
        if not self._active or (task != self._task and not nested_backward()):
            self._begin(task)
        return state.holds()  # torch calls the hook for a gradient that is undefined, too

    def in_same_pass(self, state: GradientState) -> bool:
        """Whether a gradient of this copy came in the backward pass under way."""
        if not state.ready or not self._active:
            return False
        return torch_internals.backward_pass_under_way() == self._task or nested_backward()

    @contextmanager
    def keeping_graphs(self, replica: Replica | None = None) -> Iterator[None]:
        """Around a pass with ``create_graph=True``: the gradients are reduced after it, and can be differentiated.

        Args:
            replica: the replica's context; ``None`` outside of ``run``, where a pass that has no gradient of the
                strategy's is this worker's alone, as any pass there.
        """
        self._graphs = {}
        try:
            yield
            touched = self._graphs
        finally:
            self._graphs = None
        if replica is not None or touched:
            self._reduce_graphs(touched, over_workers(self.worker) if replica is None else replica.all_reduce)

    def _reduce_graphs(self, touched: dict[int, GradientState], all_reduce: AllReduce) -> None:
        living = self.store.alive_everywhere(r for r in self.store.records() if id(r) in self.states)
        states = [s for record in living for s in self.states[id(record)]]
        for state in touched.values():
            self.keeps_local(state)  # notes that it holds what was accumulated
        # Which are reduced does not depend on what this worker used: all workers must reduce the same.
        policies = [None if self._accumulating[0] else s.record.policy for s in states]
        states = [s for s, p in zip(states, policies, strict=True) if p is not None and p.reduce_at == "backward"]
        # All workers reduce all parameters, whichever they used; the flags say whether anybody did.
        flags = all_reduce(ReduceOp.SUM, torch.tensor([float(id(s) in touched) for s in states])).tolist()
        used = [s for s, flag in zip(states, flags, strict=True) if flag]
        sum_graphs(self, [(s, s.record.components[s.replica].grad) for s in used], all_reduce)

    def _begin(self, task: int) -> None:
        if self._active:
            self._abort()  # the last backward raised before its end
            self._compare_workers()
        if self._plan_version != self.store.version:
            living = Living(self.store.records())  # what was let go stays until it is built
            self._build()
            del living
        self._reset()
        self._active, self._task = True, task
        self._pass += 1
        number = self._pass
        torch_internals.queue_end_of_backward(lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number == self._pass and self._active:  # else a nested backward has finished it already
            self._finish()
            self._compare_workers()

    def _compare_workers(self) -> None:
        if self.drift is not None and self._plan is not None:
            self.drift.after_pass(self._plan)

    @abc.abstractmethod
    def _build(self) -> None:
        """Makes what depends on the parameters alone."""

    @abc.abstractmethod
    def _reset(self) -> None:
        """Forgets the last pass."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """Ends a pass that did not come to its end, as the other workers expect."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Puts the reduced gradients into ``.grad``."""


def nested_backward() -> bool:
    """Whether this thread is in a backward that was started from within another one (reentrant checkpointing)."""
    return sum(one.f_code.co_name == torch_internals.RUN_BACKWARD for one in stack_from(sys._getframe(1))) > 1
