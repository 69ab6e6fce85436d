"""The meeting at the end of ``backward()``: gradients of replicas that other workers hold, and their bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.elastic.steps.serialized_leaves import Described, LeafReader, describe
from tfstyle_dist.gradients.reducer import GradientReducer, GradientState
from tfstyle_dist.variables.record import Record

KIND = "gradient reduction"
OLD_KIND = "gradients that only some replicas have got"
Touched = dict[int, tuple[Record, torch.Tensor, bool]]


class GradientExchange:
    """Sends and takes gradients by the number of their parameter.

    Args:
        reducer: of the strategy.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._borrowed: list[GradientState] = []

    def describe(self, replica: int, touched: Touched) -> tuple[list[Any], Described, list[torch.Tensor]]:
        """What a replica of this worker gives: what came in this pass, and what it has accumulated before."""
        given = dict(touched)
        for states in self._reducer.states.values():
            state = states[replica]
            record = state.record
            if state.dirty and id(record) not in given and record.tensor is not None:
                grad = record.components[replica].grad
                if grad is not None:
                    given[id(record)] = (record, grad, False)
        numbers = [
            [record.number, fresh, key in touched, self._reducer.state(record, replica).dirty]
            for key, (record, _, fresh) in given.items()
        ]
        described, tensors = describe([grad for _, grad, _ in given.values()])
        return numbers, described, tensors

    def take(self, replica: int, own: int, numbers: Sequence[Any], described: Described, reader: LeafReader) -> Touched:
        """What a replica of another worker gave, as if it had run here.

        Args:
            replica: that replica.
            own: one of this worker's.
            numbers: as ``describe`` gave them, like all that follows.
            described: the gradients.
            reader: of the tensors.
        """
        records = self._records()
        grads = reader.leaves(described, [None] * len(described), KIND)
        touched: Touched = {}
        for (number, fresh, is_touched, dirty), grad in zip(numbers, grads, strict=True):
            record = records[number]
            state = self._reducer.state(record, replica)
            record.components[replica].grad = grad
            # What was reduced in earlier passes is the same on all replicas.
            self._reducer.accumulated |= dirty
            state.ready, state.dirty, state.before = is_touched, dirty, self._reducer.state(record, own).before
            self._borrowed.append(state)
            if is_touched:
                touched[id(record)] = (record, grad, fresh)
        return touched

    def describe_old(self, replica: int, missing: Iterable[int]) -> tuple[list[int], Described, list[torch.Tensor]]:
        """What a replica of this worker has of gradients that only others have got in this pass: the mean counts it."""
        found, records = {}, self._records()
        for number in sorted(missing):
            record = records[number]
            if record.tensor is not None and (grad := record.components[replica].grad) is not None:
                found[number] = grad
        described, tensors = describe(list(found.values()))
        return list(found), described, tensors

    def take_old(
        self, replica: int, missing: Iterable[int], numbers: Sequence[int], described: Described, reader: LeafReader
    ) -> None:
        """What a replica of another worker has of these; nothing of all others that are missing.

        Args:
            replica: that replica.
            missing: the numbers of the parameters of which it has got nothing in this pass.
            numbers: of those that it has a gradient of, as ``describe_old`` gave them, like all that follows.
            described: the gradients.
            reader: of the tensors.
        """
        records = self._records()
        grads = dict(zip(numbers, reader.leaves(described, [None] * len(described), OLD_KIND), strict=True))
        for number in missing:
            state = self._reducer.state(records[number], replica)
            if state.record.tensor is not None:
                state.record.components[replica].grad = grads.get(number)
            state.ready = state.dirty = False
            self._borrowed.append(state)

    def _records(self) -> dict[int, Record]:
        return {states[0].record.number: states[0].record for states in self._reducer.states.values()}

    def settle(self) -> None:
        """The gradients were summed: those of other workers' replicas are not needed any more."""
        for state in self._borrowed:
            self._reducer.settle(state)
            if state.record.tensor is not None:
                state.record.components[state.replica].grad = None
        self._borrowed.clear()

    def check_nothing_waits(self, held: Sequence[int]) -> None:
        """Raises NotImplementedError when gradients were accumulated in a run and not reduced by its end."""
        waiting = [s[0].record for s in self._reducer.states.values() if any(s[r].dirty for r in held)]
        if waiting:
            raise NotImplementedError(
                f"Gradients of {self._reducer.store.names_of(waiting)} were accumulated in strategy.accumulate() and "
                "not reduced by the end of strategy.run. An elastic job cannot carry them from run to run yet: put all "
                "backward passes of one step into one function that run is given."
            )
