"""Says it when workers train different weights: some loaded, set or updated theirs in another way than worker 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.gradients.buckets import ReductionPlan
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.drift import ABSOLUTE, AT_A_TIME, RELATIVE, can_be_compared
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.store import ParameterStore

_NOT_TAKEN = (-1.0, 0.0, 0.0, 0.0)  # no norm is less than 0
_Taken = tuple[tuple[int, int], tuple[float, ...]]  # of which version and memory, and the numbers
_MOST_SENT = 32  # messages of which none had numbers of all workers: their passes are later ones of a run, or of none
_MOST_RUNS = 100  # without a pass: a program that only evaluates does not look at all weights for ever
_NAMED = 3  # parameters in a warning


class DriftBetweenWorkers:
    """Compares some numbers of the workers' parameters after backward passes 0, 1, 2, 4, 8, ...

    They are taken when the next run begins: within a step, workers may have different weights for a while. A backward
    pass of that run sends them, since all workers make it. That is one small message now and then.

    Args:
        worker: this worker and its group.
        store: the parameters.
    """

    def __init__(self, worker: Worker, store: ParameterStore) -> None:
        self._worker, self._store = worker, store
        self._passes, self._left = 0, _MOST_SENT  # how often it may still be tried to compare
        self._runs = 0  # since the last pass
        self._running = self._said = False
        self._taken: dict[Record, _Taken] = {}

    def begin_run(self) -> None:
        """Takes the numbers, if they are wanted. What fails (memory has run out) is not compared this time."""
        self._running, self._runs = True, self._runs + 1
        if not self._left or self._runs > _MOST_RUNS:
            self._taken = {}
            return
        known, self._taken = self._taken, {}
        try:
            records = ((r, r.tensor) for r in self._store.records("parameter"))
            self._taken = {r: _take(held, known.get(r)) for r, held in records if held is not None and _trains(r, held)}
        except Exception as error:
            get_logger().debug("The workers' parameters are not compared this time: %r", error)

    def end_run(self) -> None:
        """Backward passes outside of ``run`` have no numbers to send."""
        self._running = False

    def after_pass(self, plan: ReductionPlan) -> None:
        """Compares if it is time; all workers have just exchanged their gradients.

        Args:
            plan: by which they did, the same on all.
        """
        before, self._passes, self._runs = self._passes, self._passes + 1, 0
        if self._left and plan.records:
            self._left -= 1
            self._compare(plan.records)
        if not (self._said or self._passes & before):
            self._left = _MOST_SENT

    def _compare(self, records: Sequence[Record]) -> None:
        taken, self._taken = self._taken if self._running else {}, {}
        own = [taken[record][1] if record in taken else _NOT_TAKEN for record in records]
        sent = torch.tensor(own, dtype=torch.float64, device="cpu").flatten()
        buffers = self._worker.group.all_gather(sent, "comparison of parameters")
        came = [buffer.view(-1, len(_NOT_TAKEN)).tolist() for buffer in buffers]
        # What follows depends on what came alone: all workers must go on, or stop, to compare.
        if any(all(found[place][0] != _NOT_TAKEN[0] for found in came) for place in range(len(records))):
            self._left = 0
        different: list[Record] = []
        ranks: set[int] = set()
        for place, record in enumerate(records):
            who = [rank for rank, found in enumerate(came) if _differ(came[0][place], found[place])]
            different += [record] if who else []
            ranks.update(who)
        self._said = bool(different)
        if different and self._worker.group.rank == 0:
            self._warn(different, sorted(ranks))

    def _warn(self, records: Sequence[Record], ranks: Sequence[int]) -> None:
        who = ", ".join(map(str, ranks))
        get_logger().warning(
            f"Before backward pass {self._passes} worker(s) {who} had other values than worker 0 of "
            f"these parameters: {self._store.names_of(records, _NAMED)}. All workers apply the same gradients, so "
            "their weights stay different. Mostly some workers alone have loaded or changed weights, made another "
            "number of optimizer steps, or gave their optimizer another learning rate. Do the same on all workers, or "
            "load in `with strategy.scope():`, whose end gives worker 0's values to all. See docs/replicas.md."
        )


def _trains(record: Record, held: torch.Tensor) -> bool:
    averaged = record.policy is not None and record.policy.reduce_at == "backward"
    return averaged and held.requires_grad and can_be_compared(held)


def _take(held: torch.Tensor, known: _Taken | None) -> _Taken:
    """Runs without backward may follow one another: what nobody has written to since the last one is known."""
    mark = torch_internals.version_of(held), held.data_ptr()
    return known if known is not None and known[0] == mark else (mark, _numbers_of(held))


def _numbers_of(held: torch.Tensor) -> tuple[float, ...]:
    """The norm, the sum, the sum of the first half, and how many elements: other weights have others."""
    values = torch.view_as_real(held.detach().resolve_conj()) if held.is_complex() else held.detach()
    values = values.float() if values.dtype.itemsize == 1 else values  # torch computes nothing in 8 bits
    squares, sums = 0.0, [0.0, 0.0]
    for part, half in enumerate(values.reshape(-1).tensor_split(2)):
        for some in half.split(AT_A_TIME):
            squares += float(torch.linalg.vector_norm(some, dtype=torch.float64)) ** 2
            sums[part] += float(some.sum(dtype=torch.float64))
    return math.sqrt(squares), sum(sums), sums[0], values.numel()


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether more than rounding, of one element as ``say_drift`` allows it, makes the numbers differ."""
    if one[0] < 0 or other[0] < 0:
        return False
    root = math.sqrt(one[-1])
    norm = RELATIVE * max(one[0], other[0]) + ABSOLUTE * root
    allowed = (norm, norm * root, norm * root, 0)
    return any(_apart(*numbers) for numbers in zip(one, other, allowed, strict=True))


def _apart(one: float, other: float, allowed: float) -> bool:
    return one != other and not (math.isnan(one) and math.isnan(other)) and not abs(one - other) <= allowed
