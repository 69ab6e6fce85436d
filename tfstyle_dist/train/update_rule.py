"""What a TF-style optimizer does to one tensor, and the state (slots) that it keeps for each variable."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.absent_name import AbsentName
from tfstyle_dist.train.sums import value_of
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.content.common_objects import HeldInCommon

_OF_TORCH = (
    "it is no optimizer of torch.optim. Write optimizer.minimize(loss, var_list=list(model.parameters())) in the step, "
    "which computes the gradients, sums them over the replicas and updates; or take one of torch.optim"
)
_BY_TENSOR = ("_slots", "copy_slots", "_shared_rule")


class UpdateRule(HeldInCommon, abc.ABC):
    """The rule of an optimizer with its slots; ``TFOptimizer`` says which gradients it is given and where.

    Args:
        name: for messages.
    """

    row_wise = True
    """Whether a sparse gradient touches its rows alone."""

    updates_copies = True
    """Whether the rule can be applied to one replica's copy alone."""

    if not TYPE_CHECKING:
        add_param_group, param_groups, step, zero_grad = (AbsentName(_OF_TORCH) for _ in range(4))

    def __init__(self, name: str) -> None:
        self._name = name
        self._slots: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        # For variables that were updated without aggregation: the slots of the copies of replicas 1, 2, ...
        self.copy_slots: dict[int, dict[int, dict[str, Any]]] = {}

    # ---- the rule ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called once before the variables of a step are updated."""
        return

    @abc.abstractmethod
    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """The fresh state of one variable, by slot name."""

    @abc.abstractmethod
    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """Changes ``value`` and ``slots`` in place by the rule of this optimizer."""

    def update_tensor(self, target: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """Applies the rule to one copy."""
        grad = grad.to(target.device, target.dtype)
        if grad.is_sparse and self.row_wise:
            self._update_rows(target, grad.coalesce(), slots)
        else:
            self.update(target, grad.to_dense() if grad.is_sparse else grad, slots)

    def _update_rows(self, target: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """Applies the rule to the rows that have a gradient, as TF's sparse updates do."""
        rows = grad.indices()[0]
        part = target[rows]
        row_slots = {
            k: s[rows] if isinstance(s, torch.Tensor) and s.shape == target.shape else s for k, s in slots.items()
        }
        self.update(part, grad.values(), row_slots)
        target[rows] = part
        for key, slot in row_slots.items():
            if isinstance(slots[key], torch.Tensor) and slots[key].shape == target.shape:
                slots[key][rows] = slot

    # ---- slots ------------------------------------------------------------------------------------------------

    def slots_of(self, variable: Any) -> dict[str, Any]:
        """The state of one variable; made at the first call."""
        key = id(variable)
        if key not in self._slots:
            self._slots[key] = (variable, self.make_slots(value_of(variable).detach()))
        return self._slots[key][1]

    def parameter_slots(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The slots of one parameter as they are; empty when there are none."""
        entry = self._slots.get(id(parameter))
        return {} if entry is None else dict(entry[1])

    def put_parameter_slots(self, parameter: torch.Tensor, slots: Mapping[str, Any]) -> None:
        """Replaces slots of one parameter."""
        self.slots_of(parameter).update(slots)

    def common_variables(self) -> dict[str, torch.Tensor]:
        """State that belongs to no variable, by name, as ``variables`` shows it."""
        return {}

    def variables(self) -> list[torch.Tensor]:
        """The optimizer's state, sorted by name: the slots of each variable, and what belongs to none.

        Returns:
            The slot tensors themselves, empty before the first update; copies of Adam's powers of beta.
        """
        named = []
        for number, (variable, slots) in enumerate(self._slots.values()):
            record = find_record(variable)
            name = "Variable" if record is None or not record.local_name else record.local_name
            named += [(f"{name}/{self._name}", number, place, slot) for place, slot in enumerate(slots.values())]
        if self._slots:
            named += [(name, 0, 0, value) for name, value in self.common_variables().items()]
        return [slot for *_, slot in sorted(named, key=lambda entry: entry[:3])]

    def get_slot_names(self) -> list[str]:
        """The names of the state tensors."""
        return sorted({name for _, slots in self._slots.values() for name in slots})

    def get_slot(self, var: torch.Tensor, name: str) -> Any:
        """One state tensor of ``var``; ``None`` when there is none yet."""
        entry = self._slots.get(id(var))
        return None if entry is None else entry[1].get(name)

    def slot_variables(self) -> list[Any]:
        """The variables that have slots, in the order in which they were first updated."""
        return [variable for variable, _ in self._slots.values()]

    def state_dict(self) -> dict[str, Any]:
        """All state, variables numbered in the order in which they were first updated."""
        return {"slots": [dict(slots) for _, slots in self._slots.values()], "common": self.common_state()}

    def load_state_dict(self, state: dict[str, Any], variables: Sequence[torch.Tensor]) -> None:
        """Restores what ``state_dict`` gave.

        Args:
            state: the saved state.
            variables: the variables in the order in which they were first updated.

        Raises:
            ValueError: another number of variables than in the state.
        """
        if len(variables) != len(state["slots"]):
            raise ValueError(
                f"The state has {len(state['slots'])} variables, but {len(variables)} were given; give those that the "
                "optimizer had updated when it was saved, in the same order."
            )
        self.copy_slots.clear()
        self.load_common_state(state["common"])
        for variable, saved in zip(variables, state["slots"], strict=True):
            slots = self.slots_of(variable)
            for name, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(slots.get(name), torch.Tensor):
                    slots[name].copy_(value)
                else:
                    slots[name] = value

    def common_state(self) -> dict[str, Any]:
        """State that belongs to no variable."""
        return {}

    def load_common_state(self, state: dict[str, Any]) -> None:
        """Restores ``common_state``."""
        return

    # ---- as a whole, for an elastic job -------------------------------------------------------------------------

    def kept(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _BY_TENSOR}

    def kept_by_tensor(self) -> Sequence[tuple[torch.Tensor, dict[str, Any]]]:
        return list(self._slots.values())

    def keep_by_tensor(self, entries: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        self._slots.clear()
        self._slots.update({id(variable): (variable, slots) for variable, slots in entries})

    def settings(self) -> dict[str, Any]:
        """See ``HeldInCommon``: rates and counts; what a function gives is not asked for."""
        numbers = (bool, int, float, torch.Tensor)
        return {name: value for name, value in sorted(self.kept().items()) if isinstance(value, numbers)}
