"""The optimizers of ``tf.compat.v1.train``, with TensorFlow's own update rules and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.train.optimizer import TFOptimizer

Rate = float | torch.Tensor | Callable[[], float]


def number(value: Rate) -> float:
    """A rate as it is now.

    Raises:
        TypeError: it is no number.
    """
    now: Any = value() if callable(value) and not isinstance(value, torch.Tensor) else value
    try:
        return float(now)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            "A rate of an optimizer must be a number, a tensor with one entry, or a function that returns one, got "
            f"{now!r} ({type(now).__name__}). Write e.g. learning_rate=0.01."
        ) from None


class GradientDescentOptimizer(TFOptimizer):
    """``value -= learning_rate * grad`` (``tf.compat.v1.train.GradientDescentOptimizer``).

    Args:
        learning_rate: a number, tensor, or function returning a number.
        use_locking: accepted for TF's signature.
        name: for messages.

    Example:
        >>> w = Variable(3.0)
        >>> GradientDescentOptimizer(0.1).minimize(lambda: w * w, var_list=[w])
    """

    def __init__(self, learning_rate: Rate, use_locking: bool = False, name: str = "GradientDescent") -> None:
        super().__init__(name)
        self.learning_rate = learning_rate

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """None."""
        return {}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        value.sub_(grad * number(self.learning_rate))


class MomentumOptimizer(TFOptimizer):
    """``m = momentum * m + grad; value -= learning_rate * m`` (``tf.compat.v1.train.MomentumOptimizer``).

    Args:
        learning_rate: a number, tensor, or function returning a number.
        momentum: likewise.
        use_locking: accepted for TF's signature.
        name: for messages.
        use_nesterov: look-ahead form: ``value -= learning_rate * (grad + momentum * m)``.

    Example:
        >>> w = Variable(3.0)
        >>> MomentumOptimizer(0.1, momentum=0.9).minimize(lambda: w * w, var_list=[w])
    """

    def __init__(
        self,
        learning_rate: Rate,
        momentum: Rate,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(name)
        self.learning_rate, self.momentum, self.use_nesterov = learning_rate, momentum, use_nesterov

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """``momentum``, zeros."""
        return {"momentum": torch.zeros_like(value)}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        rate, momentum, m = number(self.learning_rate), number(self.momentum), slots["momentum"]
        m.mul_(momentum).add_(grad)
        value.sub_((grad + m * momentum if self.use_nesterov else m) * rate)


class AdamOptimizer(TFOptimizer):
    """Adam with the bias correction folded into the rate (``tf.compat.v1.train.AdamOptimizer``).

    Args:
        learning_rate: a number, tensor, or function returning a number.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment ("epsilon hat" of the paper).
        use_locking: accepted for TF's signature.
        name: for messages.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", section 2.1, last paragraph.

    Example:
        >>> w = Variable(3.0)
        >>> AdamOptimizer(0.001).minimize(lambda: w * w, var_list=[w])
    """

    row_wise = False  # TF decays the moments of all rows

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: Rate = 0.9,
        beta2: Rate = 0.999,
        epsilon: Rate = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(name)
        self.learning_rate, self.beta1, self.beta2, self.epsilon = learning_rate, beta1, beta2, epsilon
        self._steps = 0

    def begin_step(self) -> None:
        """Counts the step."""
        self._steps += 1

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """``m`` and ``v``, zeros."""
        return {"m": torch.zeros_like(value), "v": torch.zeros_like(value)}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        b1, b2, m, v = number(self.beta1), number(self.beta2), slots["m"], slots["v"]
        rate = number(self.learning_rate) * (1 - b2**self._steps) ** 0.5 / (1 - b1**self._steps)
        m.add_((grad - m) * (1 - b1))
        v.add_((grad * grad - v) * (1 - b2))
        value.sub_(m * rate / (v.sqrt() + number(self.epsilon)))

    def common_variables(self) -> dict[str, torch.Tensor]:
        """``beta1_power`` and ``beta2_power``: the powers for the next step."""
        betas = {"beta1_power": number(self.beta1), "beta2_power": number(self.beta2)}
        return {name: torch.tensor(beta ** (self._steps + 1)) for name, beta in betas.items()}

    def common_state(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self._steps}

    def load_common_state(self, state: dict[str, Any]) -> None:
        """The number of steps."""
        self._steps = state["steps"]


class AdadeltaOptimizer(TFOptimizer):
    """Adadelta: steps in the units of the variable (``tf.compat.v1.train.AdadeltaOptimizer``).

    ``a = rho * a + (1 - rho) * grad^2; step = sqrt(u + epsilon) / sqrt(a + epsilon) * grad;
    u = rho * u + (1 - rho) * step^2; value -= learning_rate * step``

    Args:
        learning_rate: a number, tensor, or function returning a number; 1 is the paper's.
        rho: decay of both means.
        epsilon: added under both roots.
        use_locking: accepted for TF's signature.
        name: for messages.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method".

    Example:
        >>> w = Variable(3.0)
        >>> AdadeltaOptimizer(1.0).minimize(lambda: w * w, var_list=[w])
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: Rate = 0.95,
        epsilon: Rate = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        super().__init__(name)
        self.learning_rate, self.rho, self.epsilon = learning_rate, rho, epsilon

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """``accum`` and ``accum_update``, zeros."""
        return {"accum": torch.zeros_like(value), "accum_update": torch.zeros_like(value)}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        rho, epsilon = number(self.rho), number(self.epsilon)
        accum, steps = slots["accum"], slots["accum_update"]
        accum.mul_(rho).add_(grad * grad * (1 - rho))
        step = (steps + epsilon).sqrt() * (accum + epsilon).rsqrt() * grad
        steps.mul_(rho).add_(step * step * (1 - rho))
        value.sub_(step * number(self.learning_rate))


class AdagradOptimizer(TFOptimizer):
    """``a += grad^2; value -= learning_rate * grad / sqrt(a)`` (``tf.compat.v1.train.AdagradOptimizer``).

    Args:
        learning_rate: a number, tensor, or function returning a number.
        initial_accumulator_value: first value of ``a``.
        use_locking: accepted for TF's signature.
        name: for messages.

    Raises:
        ValueError: ``initial_accumulator_value`` is not positive.

    Example:
        >>> w = Variable(3.0)
        >>> AdagradOptimizer(0.1).minimize(lambda: w * w, var_list=[w])
    """

    def __init__(
        self,
        learning_rate: Rate,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        if initial_accumulator_value <= 0.0:
            raise ValueError(f"initial_accumulator_value must be positive: {initial_accumulator_value}")
        super().__init__(name)
        self.learning_rate, self.initial_accumulator_value = learning_rate, initial_accumulator_value

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """``accumulator``."""
        return {"accumulator": torch.full_like(value, self.initial_accumulator_value)}

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        accumulator = slots["accumulator"]
        accumulator.add_(grad * grad)
        value.sub_(grad * number(self.learning_rate) / accumulator.sqrt())


class RMSPropOptimizer(TFOptimizer):
    """RMSProp, plain or centered, with momentum (``tf.compat.v1.train.RMSPropOptimizer``).

    Args:
        learning_rate: a number, tensor, or function returning a number.
        decay: of the mean square.
        momentum: of the step.
        epsilon: added under the root.
        use_locking: accepted for TF's signature.
        centered: divide by the estimated variance instead of the second moment.
        name: for messages.

    Example:
        >>> w = Variable(3.0)
        >>> RMSPropOptimizer(0.01).minimize(lambda: w * w, var_list=[w])
    """

    def __init__(
        self,
        learning_rate: Rate,
        decay: float = 0.9,
        momentum: Rate = 0.0,
        epsilon: Rate = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        super().__init__(name)
        self.learning_rate, self.decay, self.momentum, self.epsilon = learning_rate, decay, momentum, epsilon
        self.centered = centered

    def make_slots(self, value: torch.Tensor) -> dict[str, Any]:
        """``rms`` (ones), ``momentum``, and ``mg`` when centered."""
        slots = {"rms": torch.ones_like(value)}
        if self.centered:
            slots["mg"] = torch.zeros_like(value)
        slots["momentum"] = torch.zeros_like(value)
        return slots

    def update(self, value: torch.Tensor, grad: torch.Tensor, slots: dict[str, Any]) -> None:
        """See the class."""
        rms, m, decay = slots["rms"], slots["momentum"], number(self.decay)
        rms.add_((grad * grad - rms) * (1 - decay))
        spread = rms
        if self.centered:
            slots["mg"].add_((grad - slots["mg"]) * (1 - decay))
            spread = rms - slots["mg"] ** 2
        m.mul_(number(self.momentum)).add_(grad * number(self.learning_rate) / (spread + number(self.epsilon)).sqrt())
        value.sub_(m)
