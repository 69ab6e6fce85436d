"""What reads and writes the value of a variable, or of one copy of it, as ``tf.Variable`` does."""

from __future__ import annotations

from typing import Any

import torch


class ValueMethods:
    """Mixin: numbers and arrays are the value's, as in TensorFlow; torch would warn or refuse for autograd's sake.

    Of one copy ``assign`` and its relatives write to that copy alone, and return it.
    """

    def _assign(self, op: str, value: Any) -> Any:
        raise NotImplementedError

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

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Sets the variable.

        In replica context the replicas' values combine by ``aggregation`` (a collective call for SUM, MEAN and
        ONLY_FIRST_REPLICA of an ON_WRITE variable: all replicas must make it); in cross-replica context every copy
        gets the value (an ON_READ SUM variable: value / n each).

        Args:
            value: number, array or tensor of the variable's shape and dtype.
            use_locking: accepted for TF's signature; without effect.
            name: accepted for TF's signature; without effect.
            read_value: accepted for TF's signature; the result is always readable.

        Returns:
            The variable; the replica's copy of it in replica context for ON_WRITE with NONE, where the copies may
            differ; for a cross-replica write of an ON_READ variable the aggregated value.

        Raises:
            ValueError: wrong shape or dtype (a float for integers, a number out of range); or a bare Python number
                under SUM with several replicas.
            RuntimeError: called in the context of another strategy.
        """
        return self._assign("assign", value)

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Adds ``delta``; with SUM the sum of all replicas' deltas is added once.

        Args:
            delta: as ``value`` of ``assign``.
            use_locking: accepted for TF's signature; without effect.
            name: accepted for TF's signature; without effect.
            read_value: accepted for TF's signature; the result is always readable.

        Returns:
            As ``assign``.

        Raises:
            ValueError: as for ``assign``; or a cross-replica write of an ON_READ variable with aggregation SUM.
            RuntimeError: as for ``assign``.

        Example:
            >>> Variable(1.0).assign_add(2.0).value()
            tensor(3.)
        """
        return self._assign("assign_add", delta)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtracts ``delta``; arguments, result and errors as for ``assign_add``."""
        return self._assign("assign_sub", delta)
