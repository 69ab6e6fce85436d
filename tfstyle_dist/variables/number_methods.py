"""What makes numbers and arrays of a variable, or of one copy of it."""

from __future__ import annotations

from typing import Any

import torch


class NumberMethods:
    """Mixin: of a variable they are the value's, as in TensorFlow; torch would warn or refuse for autograd's sake."""

    def value(self) -> torch.Tensor:
        """The value, a new tensor that takes no gradients."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        """``value()`` as a numpy array with memory of its own (``tf.Variable.numpy``); ``force`` as in torch."""
        return self.value().cpu().numpy(force=force)

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())
