"""How a global batch was divided: noted on its tensors by the input, asked for by ``run`` and by what reduces.

Only what is worth knowing is noted, so that batches of equal shares cost nothing: nothing is looked up while nothing is
noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.values.distributed_values import DistributedValues, PerReplica


class Division(NamedTuple):
    """The shares of one global batch; the same numbers on all workers.

    Attributes:
        replicas: number of shares.
        examples: in all shares together.
        squares: sum of the squares of the shares' sizes.
        empty: number of shares without examples.
    """

    replicas: int
    examples: int
    squares: int
    empty: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Division:
        """The division into shares of ``sizes`` examples."""
        return cls(len(sizes), sum(sizes), sum(n * n for n in sizes), sum(n == 0 for n in sizes))

    @property
    def even(self) -> bool:
        """Whether all shares are of one size."""
        return self.replicas * self.squares == self.examples * self.examples


@dataclass(frozen=True)
class Share:
    """One replica's part of a global batch.

    Attributes:
        examples: in this share.
        division: of the whole; ``None``: the sizes of the shares are not known.
    """

    examples: int
    division: Division | None

    @property
    def weight(self) -> float:
        """What a mean over this share counts, where that over an equal share counts 1.

        The mean over the replicas of what was multiplied by it is the mean over the examples.
        """
        assert self.division is not None
        return self.examples * self.division.replicas / self.division.examples

    @property
    def some_empty(self) -> bool:
        """Whether a replica has no example; the same answer on all replicas."""
        return self.division is not None and self.division.empty > 0


@lru_cache(maxsize=1024)
def cut_evenly(examples: int, replicas: int) -> Division:
    """The division of a batch that is cut into pieces of ceil(examples / replicas)."""
    step = max(-(-examples // replicas), 1)
    whole, rest = divmod(examples, step)
    return Division.of([step] * whole + ([rest] if rest else []) + [0] * (replicas - whole - bool(rest)))


_Known = TypeVar("_Known", bound=Share | tuple[Share, ...])
_MOST_TEXTS = 256
_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))


class _Notes(Generic[_Known]):
    """What is known of tensors, arrays and other objects, while they live, and of the latest lists of texts."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()
        self._texts: dict[int, tuple[Any, _Known]] = {}  # lists have no weak references

    def __bool__(self) -> bool:
        return bool(self._texts) or bool(self._known.data)

    def put(self, leaf: Any, share: _Known) -> None:
        if not isinstance(leaf, list | tuple):
            self._known[leaf] = share
        else:
            self._texts[id(leaf)] = (leaf, share)
            if len(self._texts) > _MOST_TEXTS:
                del self._texts[next(iter(self._texts))]

    def get(self, leaf: Any) -> _Known | None:
        if type(leaf).__weakrefoffset__:
            found: _Known | None = self._known.get(leaf)
            return found
        return self._texts[id(leaf)][1] if id(leaf) in self._texts else None


_batches: _Notes[Share | tuple[Share, ...]] = _Notes()
"""One share of a part, or those of all local replicas."""
_results: _Notes[Share] = _Notes()


def any_noted() -> bool:
    """Whether something is noted of any batch that is still there."""
    return bool(_batches)


def note_batch(part: Any, share: Share) -> None:
    """Notes of everything in a replica's part of a batch which share it is; of an object as a whole."""
    if isinstance(part, torch.Tensor | np.ndarray):
        _batches.put(part, share)
    elif isinstance(part, Mapping):
        for value in part.values():
            note_batch(value, share)
    elif isinstance(part, list | tuple):
        if (not part and isinstance(part, list)) or (part and isinstance(part[0], str | bytes)):
            _batches.put(part, share)
        else:
            for value in part:
                note_batch(value, share)
    elif type(part).__weakrefoffset__:  # an object, e.g. of a dataclass
        _batches.put(part, share)
    elif not isinstance(part, _SCALARS) and share.division is not None and not share.division.even:
        warn_once(
            f"shares of {type(part).__name__}",
            f"No share can be noted of a {type(part).__name__}, because it has no weak references (__slots__ without "
            "__weakref__): if the batch has nothing else, all replicas weigh the same in the gradients, although their "
            "numbers of examples differ. Return tensors in tuples, lists or dicts from collate_fn.",
        )


def note_collated(batch: Any, shares: Sequence[Share]) -> None:
    """Notes which shares the replicas' values of a batch are that was collated for each of them.

    Not of the samples in it: these may be the program's own objects, and several replicas may have the same one.

    Args:
        batch: a nest of ``PerReplica``.
        shares: of the local replicas.
    """
    if isinstance(batch, PerReplica):
        _batches.put(batch, tuple(shares))
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            note_collated(value, shares)


def share_of_arguments(arguments: Iterable[Any], replica: int | None = None) -> Share | None:
    """The share that one replica works on: that of the batch among its arguments.

    Args:
        arguments: of the step function, as they were given to ``run``: where they are unpacked for a replica, lists are
            made anew, and it is not known of another list that it is part of a batch. Lists, tuples, mappings and
            distributed values are looked into.
        replica: local number of the one whose values are looked at; default: all.

    Returns:
        ``None`` where all weigh the same: no batch of a distributed dataset, one of equal shares or of shares of
        unknown sizes, or several that were divided differently; that is said once. The same on all replicas.
    """
    if not _batches:
        return None
    found: list[Share] = []
    _collect(arguments, found, replica)
    return common_share(found, "One call of strategy.run was given batches")


def common_share(found: Sequence[Share], what: str) -> Share | None:
    """The share of the one batch that a loss is computed of; ``None`` where all weigh the same.

    Args:
        found: of everything that the loss may be computed of; if these were divided differently, that is said once.
        what: the beginning of what is said.
    """
    uneven = [share for share in found if share.division is not None and not share.division.even]
    if not uneven:
        return None
    if any(share.division != uneven[0].division for share in found):
        warn_once(
            "shares of several batches",
            f"{what} that are divided in different ways, so it is not known which loss belongs to which: all replicas "
            "weigh the same in the gradients. Call run for each batch, or divide the losses by the sizes of the global "
            "batches and call strategy.set_gradient_policy(scale='SUM').",
        )
        return None
    return uneven[0]


def has_unequal_shares(values: Iterable[Any]) -> bool:
    """Whether replicas may have tensors of other sizes among ``values``, which come from a distributed dataset."""
    if not _batches:
        return False
    found: list[Share] = []
    _collect(values, found)
    return any(share.division is None or not share.division.even for share in found)


def _collect(values: Iterable[Any], found: list[Share], replica: int | None = None) -> None:
    for value in values:
        known = _batches.get(value)
        if isinstance(known, tuple):
            found += known if replica is None else known[replica : replica + 1]
        elif known is not None:
            found.append(known)
        elif isinstance(value, DistributedValues) and not isinstance(value, torch.Tensor):
            whole = replica is None or not isinstance(value, PerReplica)
            _collect(value.values if whole else value.values[replica:][:1], found, replica)
        elif isinstance(value, Mapping):
            _collect(value.values(), found, replica)
        elif isinstance(value, list | tuple):
            _collect(value, found, replica)


def note_result(leaf: Any, share: Share) -> None:
    """Notes of what a replica returned which share it was computed of; only where some share is empty."""
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DistributedValues):
        _results.put(leaf, share)


def share_of_result(leaf: Any) -> Share | None:
    """What was noted of a result."""
    return _results.get(leaf) if _results and isinstance(leaf, torch.Tensor) else None


def shares_of_results(leaves: Sequence[Any]) -> list[Share] | None:
    """The shares that per-replica results were computed of; ``None`` if no share was empty. Alike on all workers."""
    if not _results:
        return None
    shares = [_results.get(leaf) for leaf in leaves]
    known = [share for share in shares if share is not None]
    return known if len(known) == len(leaves) and all(share.some_empty for share in known) else None


def may_be_nan(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of ``tensors`` are dense numbers that can be NaN; the same on all replicas."""
    return all(t.layout is torch.strided and (t.is_floating_point() or t.is_complex()) for t in tensors)


def without_nothing(
    tensors: Sequence[torch.Tensor], shares: Sequence[Share]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """NaN that was computed of no examples, such as the mean of an empty share, is nothing; any other value counts.

    Args:
        tensors: see ``may_be_nan``.
        shares: of what each was computed.

    Returns:
        The tensors with 0 for nothing; and of their shapes and dtypes 1 where there is a value and 0 for nothing.
    """
    nothing = [t.detach().isnan() & (share.examples == 0) for t, share in zip(tensors, shares, strict=True)]
    kept = [torch.where(n, 0, t.detach()) for n, t in zip(nothing, tensors, strict=True)]
    return kept, [(~n).to(t.dtype) for n, t in zip(nothing, tensors, strict=True)]
