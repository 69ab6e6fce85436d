"""A TF-style optimizer over central storage of several processes: each updates a part, and the slots are there once.

The rule is put into a ``torch.optim.Optimizer``, which the strategy's update runner divides among the workers as it
does with the user's own (``gradients/shared_update.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.gradients.shared_update import SharedUpdateRunner
from tfstyle_dist.train import local_updates
from tfstyle_dist.train.sums import in_grad
from tfstyle_dist.variables import find_record

if TYPE_CHECKING:
    from tfstyle_dist.train.optimizer import TFOptimizer

Pairs = Sequence[tuple[torch.Tensor, Any]]


def is_shared(variable: Any) -> bool:
    """Whether a variable lies in memory that several processes share."""
    record = find_record(variable)
    return record is not None and isinstance(record.store.strategy.update_runner, SharedUpdateRunner)


class SharedRule(torch.optim.Optimizer):
    """The rule of a TF-style optimizer, for the shared variables that it has seen.

    Args:
        owner: the optimizer.
        variables: the first ones.
    """

    elementwise = True
    """The rules of the ``train`` optimizers treat every element for itself."""

    def __init__(self, owner: TFOptimizer, variables: Sequence[Any]) -> None:
        super().__init__(variables, {})
        self._owner = weakref.ref(owner)

    def apply(self, pairs: Pairs, slots: dict[int, tuple[Any, dict[str, Any]]]) -> None:
        """One update by all workers; collective.

        Args:
            pairs: summed gradients, the same on all workers, and variables.
            slots: of the owner, by the variable's id; afterwards they are the shared ones.
        """
        known = self.param_groups[0]["params"]
        given = {id(variable): grad for grad, variable in pairs}
        here = {id(variable) for variable in known}
        known.extend(variable for _, variable in pairs if id(variable) not in here)
        for variable in known:
            entry = slots.get(id(variable))
            if entry is not None and self.state.get(variable) is not entry[1]:
                self.state[variable] = entry[1]  # e.g. of a checkpoint; the runner shares it
        with in_grad(known, given):
            self.step()
        for _, variable in pairs:
            slots[id(variable)] = (variable, self.state[variable])
            record = find_record(variable)
            assert record is not None
            with torch.no_grad():
                # Every worker makes this write alike, and all publish it before the next update.
                local_updates.constrain(variable, record.components[0].detach())
            record.changes += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it by the closure
        """Applies the rule to what the runner put into the groups: this worker's parts."""
        owner = self._owner()
        assert owner is not None
        for part in self.param_groups[0]["params"]:
            if part.grad is not None:
                state = self.state[part]
                if not state:
                    state.update(owner.make_slots(part.detach()))
                owner.update_tensor(part.detach(), part.grad, state)
