"""Any ``torch.optim`` optimizer behind the TF-style interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.sums import in_grad


class Optimizer(TFOptimizer):
    """Any ``torch.optim`` optimizer behind the TF-style interface: gradients are summed in ``apply_gradients``.

    Args:
        torch_optimizer: an optimizer built over the model's parameters; it is claimed, so ``backward()`` no longer
            reduces its parameters' gradients.
        name: for messages.

    Raises:
        TypeError: no ``torch.optim.Optimizer``.

    Example:
        >>> optimizer = Optimizer(torch.optim.AdamW(model.parameters()))
        >>> loss_fn = lambda: torch.nn.functional.mse_loss(model(x), y)
        >>> strategy.run(lambda: optimizer.minimize(loss_fn))
    """

    def __init__(self, torch_optimizer: torch.optim.Optimizer, name: str = "Optimizer") -> None:
        if not isinstance(torch_optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"train.Optimizer takes a torch.optim optimizer object, got {torch_optimizer!r}; write "
                "train.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))."
            )
        super().__init__(name)
        self.torch_optimizer = torch_optimizer
        self._claim([p for g in torch_optimizer.param_groups for p in g["params"]], ())

    updates_copies = False

    def update_variables(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """Puts the sums into ``.grad`` and steps once.

        Raises:
            ValueError: a variable that the torch optimizer does not have.
        """
        given = {id(v): g for g, v in pairs}
        known = [parameter for group in self.torch_optimizer.param_groups for parameter in group["params"]]
        unknown = given.keys() - {id(parameter) for parameter in known}
        if unknown:
            raise ValueError(
                f"{len(unknown)} variable(s) given to apply_gradients are not in the groups of {self._name}, which "
                f"wraps {type(self.torch_optimizer).__name__}. Build that optimizer over them, or call its "
                "add_param_group."
            )
        with in_grad(known, given):
            self.torch_optimizer.step()

    def variables(self) -> list[torch.Tensor]:
        """The tensors of the torch optimizer's state, in the order of its parameters."""
        optimizer = self.torch_optimizer
        states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """The torch optimizer keeps the state."""
        return {}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """Not used: the torch optimizer updates all at once."""
        raise AssertionError("A torch optimizer updates all variables at once, not one by one; call apply_gradients.")

    def parts(self) -> Iterable[Any]:
        return (self.torch_optimizer,)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's own state."""
        return self.torch_optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any], variables: Sequence[torch.Tensor] = ()) -> None:
        """Restores the torch optimizer's own state."""
        self.torch_optimizer.load_state_dict(state)
