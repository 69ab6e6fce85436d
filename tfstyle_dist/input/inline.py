"""Small tensors of a batch travel inside the message of a loader process.

PyTorch hands a tensor from a loader process over as a file descriptor of shared memory, which takes some 150
microseconds whatever its size; the bytes of a small one arrive several times sooner in the message itself. Up to the
limit below that was measured to be faster; above, the shared memory is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.input.layouts import is_dense

MOST_BYTES = 256 * 1024


class Inline:
    """Stands for a tensor until it is pickled; what is read from the message is the tensor.

    Args:
        tensor: a dense tensor on the CPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        tensor = self._tensor
        data: Any = bytes_of(tensor).numpy()
        return _rebuilt, (data.tobytes(), tensor.dtype, tuple(tensor.shape))


def _rebuilt(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # A copy, because the bytes of a message must not be written to.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _fits(leaf: Any) -> bool:
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and is_dense(leaf)
        and not leaf.requires_grad
        and not leaf.is_quantized
        and 0 < leaf.nbytes <= MOST_BYTES
        and not leaf.is_conj()
        and not leaf.is_neg()
    )


class InlineCollate:
    """A collate function whose small tensors are sent inline; outside of a loader process it changes nothing.

    Args:
        collate: makes a batch of a list of samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of ``samples``."""
        batch = self.collate(samples)
        if get_worker_info() is None:
            return batch
        return _inlined(batch)


def _inlined(batch: Any) -> Any:
    """``batch`` with what fits inline; what is no plain dict, list or tuple is sent as it is."""
    kind = type(batch)
    if kind is dict or kind is OrderedDict:
        return kind((key, _inlined(value)) for key, value in batch.items())
    if kind is list or kind is tuple:
        return kind(map(_inlined, batch))
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a namedtuple
        return batch._make(map(_inlined, batch))
    return Inline(batch) if _fits(batch) else batch
