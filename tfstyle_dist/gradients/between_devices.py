"""Gradients of replicas on several devices of one process: summed in buckets, a slice of each on every device.

Each device fetches its slice of the bucket from all others, sums it, and sends the mean to all others: a reduce-scatter
and an all-gather over peer copies. No device does more than the others, and no host waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.gradients.plan import DEFAULT_BYTES_PER_PACK
from tfstyle_dist.ops import aggregate


def sum_over_devices(gradients: Sequence[Sequence[torch.Tensor]], method: int, bytes_per_pack: int = 0) -> None:
    """Replaces the gradients of every replica by their mean; the order of addition is that of one device.

    Args:
        gradients: for each replica its gradients, dense, in the same order, of equal shapes and dtypes; each replica's
            on its own device.
        method: an ``AggregationMethod``.
        bytes_per_pack: about how many bytes travel at once; 0 chooses.
    """
    for places in _buckets(gradients[0], bytes_per_pack or DEFAULT_BYTES_PER_PACK):
        flats = [torch.cat([row[place].reshape(-1) for place in places]) for row in gradients]
        devices = list(dict.fromkeys(flat.device for flat in flats))
        step = -(-flats[0].numel() // len(devices))
        means = []
        for number, device in enumerate(devices):
            parts = [flat[number * step : (number + 1) * step].to(device, non_blocking=True) for flat in flats]
            if parts[0].numel():  # the last devices may have nothing left
                means.append(aggregate(parts, method, divisor=len(flats)))
        for row, flat in zip(gradients, flats, strict=True):
            torch.cat([mean.to(flat.device, non_blocking=True) for mean in means], out=flat)
            sizes = [row[place].numel() for place in places]
            news = [new.view(row[p].shape) for new, p in zip(flat.split(sizes), places, strict=True)]
            torch_internals.foreach_copy_([row[place] for place in places], news)


def _buckets(gradients: Sequence[torch.Tensor], limit: int) -> Iterator[list[int]]:
    """Which gradients travel together: neighbours of one dtype, up to a limit of bytes."""
    places: list[int] = []
    filled = 0
    for place, gradient in enumerate(gradients):
        if gradient.numel() == 0:
            continue
        if places and (filled >= limit or gradient.dtype != gradients[places[0]].dtype):
            yield places
            places, filled = [], 0
        places.append(place)
        filled += gradient.numel() * gradient.element_size()
    if places:
        yield places
