"""The sums as operators of torch (namespace ``tfstyle_dist``), so that ``torch.compile`` can trace through them.

The compiler sees one operator with a known shape, dtype and layout of the result, and calls it at run time. What
that does is given by the package, whose dispatcher knows the backends. The operators have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

SumNew: TypeAlias = Callable[[Sequence[Tensor], str, float | None, str], Tensor]
SumInto: TypeAlias = Callable[[Sequence[Tensor], Tensor, str, float | None, str], None]
SumLists: TypeAlias = Callable[[Sequence[Tensor], int, str, float | None, str], list[Tensor]]

_ARGUMENTS: Final = "str order, float? divisor, str backend"
_library = torch.library.Library("tfstyle_dist", "DEF")
# The kernels' plans hold addresses; a CUDA graph that replays them later would read what is there by then.
_TAGS: Final = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def register(sum_new: SumNew, sum_into: SumInto, sum_lists: SumLists) -> None:
    """Defines the operators; once in a process.

    Args:
        sum_new: ``tfstyle_dist::aggregate``: a new tensor with the sum of the contributions.
        sum_into: ``tfstyle_dist::aggregate_into``: the same, written to ``out``.
        sum_lists: ``tfstyle_dist::aggregate_list``: new tensors with the sums of a list, whose contributions come one
            tensor after the other, each with its ``n``.
    """
    _library.define(f"aggregate(Tensor[] contributions, {_ARGUMENTS}) -> Tensor", tags=_TAGS)
    _library.define(f"aggregate_into(Tensor[] contributions, Tensor(a!) out, {_ARGUMENTS}) -> ()", tags=_TAGS)
    _library.define(f"aggregate_list(Tensor[] contributions, int n, {_ARGUMENTS}) -> Tensor[]", tags=_TAGS)
    for name, function in (("aggregate", sum_new), ("aggregate_into", sum_into), ("aggregate_list", sum_lists)):
        _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake("tfstyle_dist::aggregate", _fake_new, lib=_library)
    torch.library.register_fake("tfstyle_dist::aggregate_into", _fake_into, lib=_library)
    torch.library.register_fake("tfstyle_dist::aggregate_list", _fake_lists, lib=_library)


def _fake_new(contributions: Sequence[Tensor], order: str, divisor: float | None, backend: str) -> Tensor:
    return torch.empty_like(contributions[0])


def _fake_into(contributions: Sequence[Tensor], out: Tensor, order: str, divisor: float | None, backend: str) -> None:
    return None


def _fake_lists(
    contributions: Sequence[Tensor], n: int, order: str, divisor: float | None, backend: str
) -> list[Tensor]:
    return [torch.empty_like(first) for first in contributions[::n]]
