"""How workers find out that they are about to make different calls."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core.errors import CollectiveMismatchError

Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@functools.lru_cache(maxsize=1024)
def digest_of(text: str) -> int:
    """A number that stands for a text, 0 to 2**56."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def gather_texts(text: str, gather: Gather, device: torch.device) -> list[str]:
    """The texts of all workers in rank order.

    Args:
        text: this worker's.
        gather: collects tensors of one size from all workers.
        device: where control tensors live.
    """
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [int(s) for s in gather(torch.tensor([data.numel()], dtype=torch.int64, device=device))]
    return split_texts(gather(padded(data, max(sizes))), sizes)


def padded(data: torch.Tensor, size: int) -> torch.Tensor:
    """Bytes with zeros after them."""
    out = torch.zeros(size, dtype=torch.uint8, device=data.device)
    out[: data.numel()] = data
    return out


def split_texts(parts: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[str]:
    """The texts that begin the given tensors of bytes."""
    return [bytes(part[:size].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]


def mismatch(calls: Sequence[str]) -> CollectiveMismatchError:
    """The error that shows what each worker does."""
    lines = "\n".join(f"  worker {r}: {_shortened(call)}" for r, call in enumerate(calls))
    return CollectiveMismatchError(
        f"The workers make different calls; all must make the same calls in the same order:\n{lines}", calls
    )


def _shortened(text: str, most: int = 400) -> str:
    """``text`` with its middle left out when it is long; the call site at its end stays."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
