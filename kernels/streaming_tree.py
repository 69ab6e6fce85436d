"""A pairwise sum of lists of tensors that arrive one after the other, in any order, in pure torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from tfstyle_dist_kernels import problems, reference


class StreamingTree:
    """Sums contributions as they arrive, with the bits of ``reference.tree`` over all of them.

    Every contribution has an index, 0 .. N-1, and N need not be known before the end. Contributions are merged by a
    binary counter: as soon as the sums of two neighbouring halves are complete they are added, so what is added to
    what depends on the indices alone, never on the order of arrival. When contributions arrive in the order of their
    indices, at most floor(log2 N) + 1 partial sums are alive, against N for a sum of all at once.

    The tensors given are only read; they are held until they are merged and must not change before. Partial sums of
    float16 and bfloat16 are float32. Methods may be called from several threads; on a CUDA device all of them must
    use one stream.

    Example:
        >>> tree = StreamingTree()
        >>> tree.add(1, [torch.tensor(2.0)])
        >>> tree.add(0, [torch.tensor(1.0)])
        >>> tree.add(2, [torch.tensor(3.0)])
        >>> tree.finish()  # (1 + 2) + 3
        [tensor(6.)]
    """

    def __init__(self) -> None:
        # (level, position) -> the sum of contributions position * 2**level .. (position + 1) * 2**level - 1.
        self._partials: dict[tuple[int, int], list[Tensor]] = {}
        self._indices: set[int] = set()
        self._specs: list[_Spec] = []
        self._is_finished = False
        self._lock = threading.Lock()

    @property
    def num_partials(self) -> int:
        """How many partial sums, each of the size of a contribution, are alive."""
        return len(self._partials)

    def add(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Takes one contribution to every tensor of the list.

        Args:
            index: the place of this contribution among all, from 0.
            tensors: dense tensors; shapes, dtypes and devices are the same for every contribution.

        Raises:
            ValueError: the index is negative or was given before, or the tensors do not fit those given before.
            RuntimeError: ``finish`` was called.
        """
        with self._lock:
            self._check(index, tensors)
            if not self._indices:
                self._specs = [_Spec(t.shape, t.dtype, t.device) for t in tensors]
            self._indices.add(index)
            level, position, partial = 0, index, list(tensors)
            while (sibling := self._partials.pop((level, position ^ 1), None)) is not None:
                partial = _merge(sibling, partial, is_owned=level > 0)  # which is left does not change the bits
                level, position = level + 1, position >> 1
            self._partials[level, position] = partial

    @torch.no_grad()
    def finish(self, outs: Sequence[Tensor] | None = None, *, divisor: int | float | None = None) -> list[Tensor]:
        """Adds up what is left and gives the sums, rounded once to the dtype of the contributions.

        Args:
            outs: where to write, one tensor for each of the list: the shapes of the contributions, and their dtypes
                or, for float16 and bfloat16, float32. New tensors by default.
            divisor: divides the sums before they are rounded, by a true division (the mean, with ``divisor=N``).

        Returns:
            ``outs``, or the new tensors.

        Raises:
            ValueError: an index below the highest is missing, there is no contribution, or ``outs`` or the divisor
                do not fit.
            RuntimeError: ``finish`` was called before.
        """
        with self._lock:
            self._check_complete(outs, divisor)
            self._is_finished = True
            # Left are the ones of N in binary. The lowest level holds the highest indices, so it is the right half of
            # the next; larger levels are sums, which belong to the tree and can be written to.
            (level, position), *larger = sorted(self._partials)
            total = self._partials.pop((level, position))
            is_owned = level > 0
            for key in larger:
                total = _merge(self._partials.pop(key), total, is_owned=True)
                is_owned = True
        if outs is None:
            outs = [torch.empty_like(t, dtype=spec.dtype) for t, spec in zip(total, self._specs, strict=True)]
        for out, tensor in zip(outs, total, strict=True):
            if divisor is not None:
                wide = tensor.to(problems.accumulation_dtype(tensor.dtype), copy=not is_owned)
                tensor = reference.divide_(wide, divisor)
            out.copy_(tensor)
        return list(outs)

    def _check(self, index: int, tensors: Sequence[Tensor]) -> None:
        if self._is_finished:
            raise RuntimeError("this sum is finished: make a new StreamingTree for the next one")
        if index < 0:
            raise ValueError(f"the index of a contribution is {index}: count from 0")
        if index in self._indices:
            raise ValueError(f"contribution {index} was given twice: give each index once")
        if self._indices and len(tensors) != len(self._specs):
            raise ValueError(f"contribution {index} has {len(tensors)} tensors but others have {len(self._specs)}")
        for position, tensor in enumerate(tensors):
            problem = problems.find_problem([tensor], indices=[index])
            if problem is None and tensor.layout != torch.strided:
                problem = f"contribution {index} is sparse: make it dense first"
            if problem is None and self._indices:
                difference = self._specs[position].find_difference(tensor)
                problem = difference and f"contribution {index} has {difference}"
            if problem is not None:
                raise ValueError(f"tensor {position}: {problem}")

    def _check_complete(self, outs: Sequence[Tensor] | None, divisor: int | float | None) -> None:
        if self._is_finished:
            raise RuntimeError("this sum is finished: make a new StreamingTree for the next one")
        if not self._indices:
            raise ValueError("there is nothing to sum: add at least one contribution")
        if max(self._indices) >= len(self._indices):
            missing = islice((i for i in range(max(self._indices)) if i not in self._indices), 10)
            raise ValueError(
                f"contributions {list(missing)} are missing: {len(self._indices)} contributions must have the "
                f"indices 0 .. {len(self._indices) - 1}"
            )
        if outs is not None and len(outs) != len(self._specs):
            raise ValueError(f"there are {len(outs)} outs but the contributions have {len(self._specs)} tensors")
        for position, spec in enumerate(self._specs):
            stand_in = torch.empty(0, dtype=spec.dtype)
            problem = problems.find_problem([stand_in], divisor=divisor)
            if problem is None and outs is not None:
                wide = spec._replace(dtype=problems.accumulation_dtype(spec.dtype))
                problem = spec.find_difference(outs[position])
                if problem is not None and wide.find_difference(outs[position]) is not None:
                    problem = f"out has {problem}"
                else:
                    problem = None
            if problem is not None:
                raise ValueError(f"tensor {position}: {problem}")


class _Spec(NamedTuple):
    """What all contributions to one tensor have in common."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def find_difference(self, tensor: Tensor) -> str | None:
        """In what a tensor differs from the contributions that came before, or ``None``."""
        if tensor.shape != self.shape:
            return f"shape {tuple(tensor.shape)} but contributions before have {tuple(self.shape)}"
        if tensor.dtype != self.dtype:
            return f"dtype {tensor.dtype} but contributions before have {self.dtype}"
        if tensor.device != self.device:
            return f"device {tensor.device} but contributions before have {self.device}"
        return None


@torch.no_grad()
def _merge(left: list[Tensor], right: list[Tensor], *, is_owned: bool) -> list[Tensor]:
    """``left + right`` in the accumulation dtype, written to ``left`` where that is a partial sum of the tree."""
    if not is_owned:
        if all(problems.accumulation_dtype(t.dtype) == t.dtype for t in left):
            return list(torch._foreach_add(left, right))
        # An addition of two half precision tensors would round before it widens.
        left = [t.to(problems.accumulation_dtype(t.dtype), copy=True) for t in left]
    torch._foreach_add_(left, right)
    return left
