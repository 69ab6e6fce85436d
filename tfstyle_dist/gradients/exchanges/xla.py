"""One replica for each XLA device: all gradients of a pass join the step's graph in one call.

XLA compiles the step as a whole. Buckets, copies into them and sending while backward runs are the compiler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.gradients.buckets import HALF
from tfstyle_dist.gradients.reducer import GradientReducer, GradientState
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.store import ParameterStore

if TYPE_CHECKING:
    from tfstyle_dist.comm.xla.xla_group import XlaGroup


class GraphReducer(GradientReducer):
    """Reduces at the end of ``backward()``.

    All replicas run one program, so a parameter has a gradient on all of them or on none.
    """

    def __init__(self, worker: Worker, store: ParameterStore) -> None:
        super().__init__(worker, store)
        # The copies with a new gradient, for each backward pass under way (by autograd's number).
        self._touched: dict[int, dict[int, GradientState]] = {}

    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        """Notes the gradient; the first one of a pass asks to be called at its end."""
        if self.keeps_local(state):
            return
        state.ready = True
        task = torch_internals.backward_pass_under_way()
        if task not in self._touched:
            self._touched[task] = {}
            torch_internals.queue_end_of_backward(lambda: self._finish(task))
        self._touched[task][id(state)] = state

    def in_same_pass(self, state: GradientState) -> bool:
        """Whether a gradient of this copy came in the backward pass under way."""
        return id(state) in self._touched.get(torch_internals.backward_pass_under_way(), {})

    def _finish(self, task: int) -> None:
        self.forget_dead()
        touched = self._touched.pop(task)
        touched.update({id(s): s for states in self.states.values() for s in states if s.dirty})
        # The order is part of the program: that of creation, which is the same on all replicas.
        states = sorted(touched.values(), key=lambda state: state.record.number)
        with torch.no_grad():
            for divisor in (None, self.worker.num_replicas):
                self._reduce([s for s in states if s.record.tensor is not None], divisor)

    def _reduce(self, states: Sequence[GradientState], divisor: int | None) -> None:
        mine = [s for s in states if self.divisor(s.record) == divisor]
        parts = [(state, part) for state in mine if (part := self.contribution(state)) is not None]
        totals = [_own(part) for _, part in parts]
        group = cast("XlaGroup", self.worker.group)
        group.reduce_gradients(totals, 1.0 if divisor is None else 1.0 / divisor)
        for (state, part), total in zip(parts, totals, strict=True):
            old, parameter = self.old_part(state), state.record.components[0]
            total = total.to(part.dtype)
            parameter.grad = total if old is None else total + old
            self.settle(state)


def _own(part: torch.Tensor) -> torch.Tensor:
    """A dense tensor that may be overwritten; half precision is summed in float32."""
    dense = part.to_dense() if part.is_sparse else part
    return dense.float() if dense.dtype in HALF else dense.detach().clone()
