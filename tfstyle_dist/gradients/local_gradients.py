"""Gradients of one replica alone that are about to be applied: results of ``torch.autograd.grad``.

``backward()`` makes gradients the same on all replicas, ``torch.autograd.grad`` does not. Who puts its result into
``.grad`` and steps would let the replicas drift apart without a word, so the results are remembered while they live.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tfstyle_dist.core.torch_internals import WeakIdKeyDictionary

_results: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_local(gradients: Iterable[torch.Tensor | None]) -> None:
    """Remembers results of ``torch.autograd.grad``."""
    for gradient in gradients:
        if type(gradient) is torch.Tensor:
            _results[gradient] = True


def any_local() -> bool:
    """Whether any such result is alive."""
    return len(_results) > 0


def is_local(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is what ``torch.autograd.grad`` gave one replica."""
    return gradient is not None and gradient in _results
