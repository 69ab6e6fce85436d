"""What steps tell, names and numbers: values of their own, which nothing has to be read for later.

The result of a metric may be its own state. Its value is read where all workers read it; the chief's callbacks, whose
events at batches may run in threads of their own, take it at any time.
"""

from __future__ import annotations

from typing import Any

import torch

from tfstyle_dist.integrations.keras.backend import keras


def own_values(logs: dict[str, Any]) -> dict[str, Any]:
    """The logs with a copy of each value, without dicts in them: the result of ``CompileMetrics`` is one.

    Args:
        logs: as a step returns them, or ``get_metrics_result``.
    """
    own: dict[str, Any] = {}
    for name, value in logs.items():
        own.update(own_values(value) if isinstance(value, dict) else {name: _own(value)})
    return own


def _own(value: Any) -> Any:
    if isinstance(value, keras.Variable):
        value = keras.ops.convert_to_tensor(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def as_tensor(value: Any) -> torch.Tensor:
    """A log as a tensor."""
    return torch.as_tensor(value).detach()


def as_number(value: Any) -> float:
    """A log as a number; 0 for several numbers: such a metric is read from its state."""
    tensor = as_tensor(value)
    return float(tensor) if tensor.numel() == 1 else 0.0
