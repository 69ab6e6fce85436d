"""The sums under ``torch.compile``: single operators of the graph, which call the dispatcher when the graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tfstyle_dist.ops.dispatch import sum_list, sum_one
from tfstyle_dist_kernels import library


def traced_one(
    present: Sequence[Tensor], order: str, out: Tensor | None, divisor: int | float | None, backend: str
) -> Tensor:
    """``sum_one`` as an operator of the graph that is being traced."""
    number = None if divisor is None else float(divisor)
    present = [t.detach() for t in present]
    if out is None:
        return cast(Tensor, torch.ops.tfstyle_dist.aggregate(present, order, number, backend))
    torch.ops.tfstyle_dist.aggregate_into(present, out.detach(), order, number, backend)
    return out


def traced_list(
    checked: Sequence[Sequence[Tensor]],
    order: str,
    outs: Sequence[Tensor] | None,
    divisor: int | float | None,
    backend: str,
) -> list[Tensor]:
    """``sum_list`` as an operator of the graph that is being traced."""
    if outs is not None or len({len(present) for present in checked}) != 1:
        targets: Sequence[Tensor | None] = [None] * len(checked) if outs is None else outs
        return [traced_one(p, order, out, divisor, backend) for p, out in zip(checked, targets, strict=True)]
    flat = [t.detach() for present in checked for t in present]
    number = None if divisor is None else float(divisor)
    return list(torch.ops.tfstyle_dist.aggregate_list(flat, len(checked[0]), order, number, backend))


def _run_new(contributions: Sequence[Tensor], order: str, divisor: float | None, backend: str) -> Tensor:
    return sum_one(contributions, order, None, divisor, backend)


def _run_into(contributions: Sequence[Tensor], out: Tensor, order: str, divisor: float | None, backend: str) -> None:
    sum_one(contributions, order, out, divisor, backend)


def _run_lists(
    contributions: Sequence[Tensor], n: int, order: str, divisor: float | None, backend: str
) -> list[Tensor]:
    lists = [contributions[start : start + n] for start in range(0, len(contributions), n)]
    return sum_list(lists, order, None, divisor, backend)


library.register(_run_new, _run_into, _run_lists)
