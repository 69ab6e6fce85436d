"""Parameters that each replica of a process made for itself in a step: their gradients belong together.

A layer that the first ``forward`` builds, or a parameter that a step puts in the place of another one, is another
object on each replica, with a record of its own. Replicas make the same calls in the same order, so that what one made
first is what another made first. On ranks nothing is to be done: each process has one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.variables.record import Placement, Record

_Touched = dict[int, Any]  # by the record's id: the record, its gradient, and more


def join(reducer: GradientReducer, all_touched: Sequence[_Touched]) -> bool:
    """Puts together, once, what each replica made and got a gradient for in the pass that all of them have ended.

    Args:
        reducer: knows the states of all records; those of counterparts become one list.
        all_touched: for each replica; what follows another record is under that one's id afterwards.

    Returns:
        Whether there was any.

    Raises:
        RuntimeError: there was, under central storage.
    """
    made = [_made_by(replica, all_touched) for replica in range(len(all_touched))]
    if not made[0] or any([_look(r) for r in records] != [_look(r) for r in made[0]] for records in made):
        return False
    if reducer.store.placement is Placement.CENTRAL:
        raise RuntimeError(
            f"The step made the parameters {reducer.store.names_of(made[0])} once in each replica. Under central "
            "storage there is one copy of the parameters for all replicas, and these would be several. Make them in "
            "strategy.scope(), or call the model once on a batch before the first strategy.run(...), or use "
            "MirroredStrategy, where each replica has its own."
        )
    for group in zip(*made, strict=True):
        states = [reducer.state(record, replica) for replica, record in enumerate(group)]
        for replica, record in enumerate(group):
            record.counterparts = group
            reducer.states[id(record)] = states
            all_touched[replica][id(group[0])] = all_touched[replica].pop(id(record))
    return True


def _made_by(replica: int, all_touched: Sequence[_Touched]) -> list[Record]:
    """What a replica made in its turn, and no other one has used, in the order in which it was made."""
    records: list[Record] = [new[0] for new in all_touched[replica].values()]
    fresh = [r for r in records if r.maker == replica and r.counterparts is None]
    return [r for r in fresh if sum(id(r) in touched for touched in all_touched) == 1]


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
