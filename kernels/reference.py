"""N-ary sums in pure torch: the fallback on every device and the oracle of the compiled kernels.

Three orders of summation; each gives the same bits whatever the layout, blocking or number of threads:

* ``add_n``: TensorFlow's eager ``tf.add_n``. A head of N % 8 inputs (0 means 8, 1 means 9) from left to
  right, then for each further 8 inputs ``total = total + (in1 + ... + in8)``.
* ``tree``: a fixed pairwise shape, split at the largest power of two below N.
* ``accumulate_n``: the left chain ``((in1 + in2) + in3) + ...``.

float32, float64, complex and integer inputs are summed in their own dtype (integers wrap around as in torch).
float16 and bfloat16 accumulate in float32, are divided there if a divisor is given, and are rounded once at
the end: more exact than TensorFlow, which rounds after every add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from tfstyle_dist_kernels.problems import HALF, accumulation_dtype, find_problem

# Totals above this size are summed in blocks, so that the running total stays in the CPU's cache and each
# contribution is read from memory once. Smaller ones fit the cache, where blocks only cost calls.
BLOCKED_ABOVE_BYTES: Final = 4 << 20
BLOCK_BYTES: Final = 1 << 21

_Order: TypeAlias = Callable[[Tensor, Sequence[Tensor], "_Scratch"], None]


def add_n(contributions: Sequence[Tensor], out: Tensor | None = None, *, divisor: int | float | None = None) -> Tensor:
    """Sums the contributions in TensorFlow's eager order; float32 results have TensorFlow's bits.

    Args:
        contributions: N >= 1 dense tensors of one shape, dtype and device, in any strides.
        out: where to write: the contributions' shape and device, and their dtype or, for float16 and
            bfloat16, float32. It may be one of the contributions or overlap them in any way: where the sum in
            place would read what it already wrote, a block-sized temporary (``out`` is a contribution other
            than the first two) or one of the size of ``out`` (it overlaps one in part) is used. A new tensor
            by default, which never shares memory with a contribution, also for N = 1.
        divisor: divides the sum before it is rounded, by a true division (the mean, with ``divisor=N``).

    Returns:
        ``out``, or the new tensor.

    Raises:
        ValueError: there is no contribution, shapes, dtypes or devices differ, the dtype has no sum (bool),
            ``out`` does not fit, or the divisor is 0 or meets integers.

    Example:
        >>> add_n([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])])
        tensor([ 9., 12.])
    """
    return _reduce("add_n", contributions, out, divisor)


def tree(contributions: Sequence[Tensor], out: Tensor | None = None, *, divisor: int | float | None = None) -> Tensor:
    """Sums the contributions pairwise, split at the largest power of two below N.

    The shape depends on N alone, so contributions that arrive one by one can be merged by a binary counter
    and still give these bits. At most ceil(log2 N) blocks are live at a time.

    Args:
        contributions: as for ``add_n``.
        out: as for ``add_n``.
        divisor: as for ``add_n``.

    Returns:
        ``out``, or the new tensor.

    Raises:
        ValueError: as for ``add_n``.

    Example:
        >>> tree([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)])  # (1 + 2) + 3
        tensor(6.)
    """
    return _reduce("tree", contributions, out, divisor)


def accumulate_n(
    contributions: Sequence[Tensor], out: Tensor | None = None, *, divisor: int | float | None = None
) -> Tensor:
    """Sums the contributions one after the other, as TensorFlow's ``EXPERIMENTAL_ACCUMULATE_N`` does.

    Args:
        contributions: as for ``add_n``.
        out: as for ``add_n``.
        divisor: as for ``add_n``.

    Returns:
        ``out``, or the new tensor.

    Raises:
        ValueError: as for ``add_n``.

    Example:
        >>> accumulate_n([torch.tensor(1), torch.tensor(2), torch.tensor(3)])
        tensor(6)
    """
    return _reduce("accumulate_n", contributions, out, divisor)


def unavailable() -> str | None:
    """Pure torch can always be used."""
    return None


def check_order(order: str) -> None:
    """Raises ``ValueError`` unless ``order`` is the name of an order of summation."""
    if order not in _ORDERS:
        raise ValueError(f"unknown order {order!r}: write one of {', '.join(map(repr, _ORDERS))}")


def sum_lists(
    contributions: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    order: str,
    *,
    divisor: int | float | None = None,
) -> None:
    """Sums the contributions to each tensor of a list; every backend has a function of this form.

    Args:
        contributions: ``contributions[t][i]`` is contribution i to tensor t; as for ``add_n``, and taken as checked.
        outs: where to write the sum of each tensor; as ``out`` of ``add_n``.
        order: ``"add_n"``, ``"tree"`` or ``"accumulate_n"``.
        divisor: as for ``add_n``.

    Raises:
        ValueError: the order is unknown, or there are more tensors than outputs or fewer.
    """
    check_order(order)
    with torch.no_grad():
        for parts, out in zip(contributions, outs, strict=True):
            sum_checked(parts, out, order, divisor=divisor)


def divide_(total: Tensor, divisor: int | float) -> Tensor:
    """Divides ``total`` in place by a true division and returns it."""
    # Complex numbers by components: the complex division by x + 0i rounds more often.
    real = torch.view_as_real(total) if total.is_complex() else total
    if real.is_cpu:
        real.div_(divisor)
    else:
        # A tensor on the device, not a Python number: for a number, torch on CUDA multiplies by the reciprocal.
        real.div_(torch.full((), divisor, dtype=real.dtype, device=real.device))
    return total


class _Scratch:
    """The temporaries of a sum, made on first use and used again for every block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[int, Tensor] = {}

    def take(self, level: int, like: Tensor) -> Tensor:
        """The temporary number ``level`` in the shape of ``like``, a block; no later block is larger."""
        buffer = self._buffers.get(level)
        if buffer is None:
            buffer = self._buffers[level] = torch.empty_like(like, dtype=self._dtype)
        return buffer if buffer.shape == like.shape else buffer[: like.shape[0]]


def _reduce(order: str, contributions: Sequence[Tensor], out: Tensor | None, divisor: int | float | None) -> Tensor:
    problem = find_problem(contributions, out, divisor=divisor)
    if problem is None and any(t.layout != torch.strided for t in contributions):
        problem = "sparse contributions cannot be summed here: make them dense first"
    if problem is not None:
        raise ValueError(problem)
    with torch.no_grad():
        return sum_checked(contributions, out, order, divisor=divisor)


def sum_checked(
    contributions: Sequence[Tensor], out: Tensor | None, order: str, *, divisor: int | float | None = None
) -> Tensor:
    """As the function of that order, for arguments that ``find_problem`` accepts and under ``torch.no_grad``."""
    first, add_up = contributions[0], _ORDERS[order]
    target, is_read_late = out, False
    if target is None:
        target = torch.empty_like(first)
        if first.dtype not in HALF and target.nbytes <= BLOCKED_ABOVE_BYTES:
            add_up(target, contributions, _Scratch(first.dtype))
            return target if divisor is None else divide_(target, divisor)
    elif _can_write_directly(target, contributions):
        # Every order reads the first two contributions before it writes; later ones must stay intact.
        is_read_late = any(_is_same_view(target, other) for other in contributions[2:])
    else:
        target = torch.empty_like(first, dtype=target.dtype)
    _sum_into(target, add_up, contributions, divisor, is_read_late)
    return target if out is None or out is target else out.copy_(target)


def _sum_into(
    target: Tensor,
    order: _Order,
    contributions: Sequence[Tensor],
    divisor: int | float | None,
    is_read_late: bool,
) -> None:
    dtype = accumulation_dtype(target.dtype)
    is_copy = len(contributions) == 1 and divisor is None
    staged = is_read_late or (target.dtype != dtype and not is_copy)
    scratch = _Scratch(dtype)
    for target_block, *inputs in _blocks([target, *contributions], dtype):
        total = scratch.take(0, target_block) if staged else target_block
        order(total, inputs, scratch)
        if divisor is not None:
            divide_(total, divisor)
        if staged:
            target_block.copy_(total)


def _blocks(tensors: list[Tensor], dtype: torch.dtype) -> Iterable[Sequence[Tensor]]:
    """The tensors cut into matching blocks that fit the cache, or whole where that cannot help."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() * dtype.itemsize <= BLOCKED_ABOVE_BYTES:
        return [tensors]
    # Tensors of one dense layout (row-major, channels last, ...) have the same elements at the same places.
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    permuted = [t.permute(order) for t in tensors]
    if not all(t.is_contiguous() for t in permuted):
        return [tensors]
    num_elements = max(1, BLOCK_BYTES // dtype.itemsize)
    return zip(*(torch.split(t.view(-1), num_elements) for t in permuted), strict=True)


def _add_n_order(total: Tensor, inputs: Sequence[Tensor], scratch: _Scratch) -> None:
    head = (len(inputs) - 2) % 8 + 2
    _chain_order(total, inputs[:head], scratch)
    for start in range(head, len(inputs), 8):
        part = scratch.take(1, total)
        _chain_order(part, inputs[start : start + 8], scratch)
        total.add_(part)


def _chain_order(total: Tensor, inputs: Sequence[Tensor], scratch: _Scratch) -> None:
    if len(inputs) == 1 or inputs[0].dtype != total.dtype:
        # torch.add of two half precision tensors would round before it widens.
        total.copy_(inputs[0])
        rest = inputs[1:]
    else:
        torch.add(inputs[0], inputs[1], out=total)
        rest = inputs[2:]
    for other in rest:
        total.add_(other)


def _tree_order(total: Tensor, inputs: Sequence[Tensor], scratch: _Scratch, level: int = 1) -> None:
    if len(inputs) <= 3:  # (a + b) + c is the chain
        _chain_order(total, inputs, scratch)
        return
    half = 1 << ((len(inputs) - 1).bit_length() - 1)
    _tree_order(total, inputs[:half], scratch, level)
    if len(inputs) == half + 1:
        total.add_(inputs[half])
        return
    right = scratch.take(level, total)
    _tree_order(right, inputs[half:], scratch, level + 1)
    total.add_(right)


_ORDERS: Final[dict[str, _Order]] = {"add_n": _add_n_order, "tree": _tree_order, "accumulate_n": _chain_order}


def _can_write_directly(out: Tensor, contributions: Sequence[Tensor]) -> bool:
    """Whether a block of ``out`` may be written before later blocks are read."""
    if out.is_conj() or out.is_neg():  # lazy views, whose memory does not hold their values
        return False
    start, end = _byte_range(out)
    for other in contributions:
        other_start, other_end = _byte_range(other)
        if start < other_end and other_start < end and not _is_same_view(out, other):
            return False
    return True


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses a tensor touches; not its storage, as two storages may share memory (dlpack)."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
