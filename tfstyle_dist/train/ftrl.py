"""``tf.compat.v1.train.FtrlOptimizer``."""

from __future__ import annotations

from typing import Any

import torch

from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.optimizers import Rate, number


class FtrlOptimizer(TFOptimizer):
    """Follow the regularised leader (``tf.compat.v1.train.FtrlOptimizer``).

    Args:
        learning_rate: a number, tensor, or function returning a number.
        learning_rate_power: at most 0; how fast the rate falls.
        initial_accumulator_value: first value of the squared-gradient sum.
        l1_regularization_strength: at least 0.
        l2_regularization_strength: at least 0.
        use_locking: accepted for TF's signature.
        name: for messages.
        accum_name: accepted for TF's signature.
        linear_name: accepted for TF's signature.
        l2_shrinkage_regularization_strength: at least 0; a penalty on the magnitude.
        beta: added to the rate's denominator.

    Raises:
        ValueError: a value out of its range.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches".

    Example:
        >>> w = Variable(3.0)
        >>> FtrlOptimizer(0.1).minimize(lambda: w * w, var_list=[w])
    """

    def __init__(
        self,
        learning_rate: Rate,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ) -> None:
        for label, strength in (
            ("initial_accumulator_value", initial_accumulator_value),
            ("l1_regularization_strength", l1_regularization_strength),
            ("l2_regularization_strength", l2_regularization_strength),
            ("l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength),
        ):
            if strength < 0.0:
                raise ValueError(f"{label} {strength} needs to be positive or zero")
        if learning_rate_power > 0.0:
            raise ValueError(f"learning_rate_power {learning_rate_power} needs to be negative or zero")
        super().__init__(name)
        self.learning_rate, self.power = learning_rate, learning_rate_power
        self.initial_accumulator_value = initial_accumulator_value
        self.l1, self.l2, self.shrinkage = (
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
        )
        self.beta = beta or 0.0

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """``accum`` and ``linear``."""
        return {"accum": torch.full_like(value, self.initial_accumulator_value), "linear": torch.zeros_like(value)}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        rate, accum, linear = number(self.learning_rate), slots["accum"], slots["linear"]
        l2 = self.l2 + self.beta / (2.0 * rate)
        shrunk = grad + 2.0 * self.shrinkage * value
        grown = accum + grad * grad
        linear.add_(shrunk - (grown ** (-self.power) - accum ** (-self.power)) / rate * value)
        quadratic = grown ** (-self.power) / rate + 2.0 * l2
        value.copy_(torch.where(linear.abs() > self.l1, (linear.sign() * self.l1 - linear) / quadratic, 0.0))
        accum.copy_(grown)
