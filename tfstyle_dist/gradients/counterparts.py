"""Parameters that each replica of a process made for itself in a step: their gradients belong together.

A layer that the first ``forward`` builds, or a parameter that a step puts in the place of another one, is another
object on each replica, with a record of its own. Replicas make the same calls in the same order, so that what one made
first in a run is what another made first in it, whichever of them uses it. On ranks nothing is to be done: each process
has one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.variables.record import Placement, Record

_Touched = dict[int, Any]  # by the record's id: the record, its gradient, and more


def join(reducer: GradientReducer, all_touched: Sequence[_Touched]) -> bool:
    """Puts together what each replica made as the same one, when they meet for the first time after that.

    Args:
        reducer: knows the states of all records; those of counterparts become one list.
        all_touched: for each replica what came in this pass; what follows another record is under that one's id then.

    Returns:
        Whether there was any.

    Raises:
        RuntimeError: one was trained under central storage.
    """
    groups = _groups(reducer, len(all_touched))
    if reducer.store.placement is Placement.CENTRAL:
        _refuse(reducer, [g[0] for g in groups if any(id(r) in t for r, t in zip(g, all_touched, strict=True))])
        return False
    groups = [group for group in groups if all(_look(record) == _look(group[0]) for record in group)]
    for group in groups:
        states = [reducer.state(record, replica) for replica, record in enumerate(group)]
        for record, touched in zip(group, all_touched, strict=True):
            record.counterparts = group
            reducer.states[id(record)] = states
            if id(record) in touched:
                touched[id(group[0])] = touched.pop(id(record))
    return bool(groups)


def _groups(reducer: GradientReducer, count: int) -> list[tuple[Record, ...]]:
    """What is not joined yet, and all replicas have made; in the order in which it was made."""
    made: dict[tuple[int, int], dict[int, Record]] = {}
    for record in reducer.store.records("parameter"):
        if record.made_as is not None and record.counterparts is None and id(record) in reducer.states:
            made.setdefault(record.made_as, {})[record.maker or 0] = record
    return [tuple(by_replica[r] for r in range(count)) for by_replica in made.values() if len(by_replica) == count]


def _refuse(reducer: GradientReducer, trained: Sequence[Record]) -> None:
    if trained:
        raise RuntimeError(
            f"The step made the parameters {reducer.store.names_of(trained)} once in each replica. Under central "
            "storage there is one copy of the parameters for all replicas, and these would be several. Make them in "
            "strategy.scope(), or call the model once on a batch before the first strategy.run(...), or use "
            "MirroredStrategy, where each replica has its own."
        )


def _look(record: Record) -> tuple[Any, ...]:
    tensor = record.tensor
    return record.local_name, None if tensor is None else (tensor.shape, tensor.dtype)


def own_records(records: Sequence[Record], replica: int) -> list[Record]:
    """What a replica has in the place of each record, under the policy that the program has set."""
    own = []
    for record in records:
        mine = record if record.counterparts is None else record.counterparts[replica]
        mine.policy = record.policy
        own.append(mine)
    return own
