"""Gradients of replicas on several devices of one process: summed in buckets, a slice of each on every device.

Each device fetches its slice of the bucket from all others, sums it, and sends the mean to all others: a reduce-scatter
and an all-gather over peer copies. No device does more than the others, and no host waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.gradients.buckets import DEFAULT_BYTES_PER_PACK
from tfstyle_dist.ops import aggregate


def average_over_devices(gradients: Sequence[Sequence[torch.Tensor]], method: int, bytes_per_pack: int = 0) -> None:
    """Replaces the gradients of every replica by their mean; the order of addition is that of one device.

    Args:
        gradients: for each replica its gradients, dense, in the same order, of equal shapes and dtypes; each replica's
            on its own device, or those of parameters that are kept on the CPU there.
        method: an ``AggregationMethod``.
        bytes_per_pack: about how many bytes travel at once; 0 chooses.
    """
    for positions in _buckets(gradients[0], bytes_per_pack or DEFAULT_BYTES_PER_PACK):
        flats = [torch.cat([row[position].reshape(-1) for position in positions]) for row in gradients]
        devices = list(dict.fromkeys(flat.device for flat in flats))
        step = -(-flats[0].numel() // len(devices))
        means = []
        for number, device in enumerate(devices):
            parts = [flat[number * step : (number + 1) * step].to(device, non_blocking=True) for flat in flats]
            if parts[0].numel():  # the last devices may have nothing left
                means.append(aggregate(parts, method, divisor=len(flats)))
        for row, flat in zip(gradients, flats, strict=True):
            torch.cat([mean.to(flat.device, non_blocking=True) for mean in means], out=flat)
            sizes = [row[position].numel() for position in positions]
            news = [new.view(row[p].shape) for new, p in zip(flat.split(sizes), positions, strict=True)]
            torch_internals.foreach_copy_([row[position] for position in positions], news)


def _buckets(gradients: Sequence[torch.Tensor], limit: int) -> Iterator[list[int]]:
    """Which gradients travel together: neighbours of one dtype and device, up to a limit of bytes."""
    positions: list[int] = []
    filled = 0
    for position, gradient in enumerate(gradients):
        if gradient.numel() == 0:
            continue
        first = gradients[positions[0]] if positions else gradient
        if positions and (filled >= limit or (gradient.dtype, gradient.device) != (first.dtype, first.device)):
            yield positions
            positions, filled = [], 0
        positions.append(position)
        filled += gradient.numel() * gradient.element_size()
    if positions:
        yield positions
