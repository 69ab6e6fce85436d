"""The tree of contributions that arrive one by one: the bits of the tree of all at once, and few partial sums."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from triton_env import assert_same, make

from tfstyle_dist_kernels import problems, reference
from tfstyle_dist_kernels.streaming_tree import StreamingTree

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32]


@given(
    order=st.integers(1, 70).flatmap(lambda n: st.permutations(range(n))),
    dtype=st.sampled_from(DTYPES),
    has_divisor=st.booleans(),
    is_wide=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_bits_are_the_trees_in_any_order_of_arrival(
    order: list[int], dtype: torch.dtype, has_divisor: bool, is_wide: bool
) -> None:
    n = len(order)
    divisor = 3 if has_divisor and (dtype.is_floating_point or dtype.is_complex) else None
    lists = list(zip(*(make(n, shape, dtype, seed) for seed, shape in enumerate([(7,), (), (2, 0)])), strict=True))
    copies = [[t.clone() for t in tensors] for tensors in lists]
    outs = None
    if is_wide:
        outs = [torch.empty_like(t, dtype=problems.accumulation_dtype(dtype)) for t in lists[0]]
    tree = StreamingTree()
    for index in order:
        tree.add(index, lists[index])
    results = tree.finish(outs, divisor=divisor)
    assert tree.num_partials == 0
    for position, result in enumerate(results):
        contributions = [tensors[position] for tensors in lists]
        expected = reference.tree(contributions, outs and torch.empty_like(outs[position]), divisor=divisor)
        assert_same(result, expected)
        assert all(result is not contribution for contribution in contributions)
    for tensors, copied in zip(lists, copies, strict=True):
        for tensor, copy in zip(tensors, copied, strict=True):
            assert_same(tensor, copy)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 63, 64, 100])
def test_few_partial_sums_are_alive(n: int) -> None:
    tree = StreamingTree()
    most = 0
    for index in range(n):
        tree.add(index, [torch.ones(3)])
        most = max(most, tree.num_partials)
    assert most <= n.bit_length()  # floor(log2 n) + 1
    assert_same(tree.finish()[0], torch.full((3,), float(n)))


def test_merged_contributions_are_let_go() -> None:
    alive: set[int] = set()

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            alive.discard(id(self))

    tree = StreamingTree()
    for index in range(16):
        tensor = torch.ones(3).as_subclass(Watched)
        alive.add(id(tensor))
        tree.add(index, [tensor])
        del tensor
    assert len(alive) <= 2
    assert float(tree.finish()[0].sum()) == 48


def test_outs_may_be_used_again() -> None:
    out = torch.full((3,), torch.nan)
    for value in (1.0, 2.0):
        tree = StreamingTree()
        tree.add(0, [torch.full((3,), value)])
        assert tree.finish([out], divisor=2)[0] is out
        assert_same(out, torch.full((3,), value / 2))


def test_any_strides() -> None:
    contributions = [make(1, (4, 6), seed=index)[0].T for index in range(3)]
    contributions.append(make(1, 6, seed=9)[0][:, None].expand(6, 4))
    tree = StreamingTree()
    for index, tensor in enumerate(contributions):
        tree.add(index, [tensor])
    out = torch.empty(6, 8)[:, ::2]
    tree.finish([out])
    assert_same(out, reference.tree(contributions))


def test_no_gradient_is_recorded() -> None:
    tree = StreamingTree()
    for index in range(3):
        tree.add(index, [torch.ones(3, requires_grad=True)])
    assert not tree.finish()[0].requires_grad


def test_several_threads() -> None:
    contributions = make(64, 500)
    tree = StreamingTree()
    start = threading.Barrier(4)

    def add(first: int) -> None:
        start.wait(timeout=20)
        for index in range(first, 64, 4):
            tree.add(index, [contributions[index]])

    threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert_same(tree.finish()[0], reference.tree(contributions))


def added(*indices: int) -> StreamingTree:
    tree = StreamingTree()
    for index in indices:
        tree.add(index, [torch.ones(3, device="cpu"), torch.ones(2)])
    return tree


@pytest.mark.parametrize(
    ("index", "tensors", "message"),
    [
        (0, [torch.ones(3), torch.ones(2)], "contribution 0 was given twice"),
        (-1, [torch.ones(3), torch.ones(2)], "index of a contribution is -1: count from 0"),
        (1, [torch.ones(3)], "contribution 1 has 1 tensors but others have 2"),
        (1, [torch.ones(3), torch.ones(3)], r"tensor 1: contribution 1 has shape \(3,\) but .* \(2,\)"),
        (1, [torch.ones(3), torch.ones(2).double()], "tensor 1: contribution 1 has dtype torch.float64"),
        (1, [torch.ones(3), torch.ones(2, device="meta")], "tensor 1: contribution 1 has device meta"),
        (1, [torch.ones(3).bool(), torch.ones(2)], "tensor 0: contribution 1 has dtype torch.bool"),
        (1, [torch.ones(3).to_sparse(), torch.ones(2)], "tensor 0: contribution 1 is sparse"),
    ],
)
def test_refused_contributions(index: int, tensors: list[Tensor], message: str) -> None:
    tree = added(0)
    with pytest.raises(ValueError, match=message):
        tree.add(index, tensors)
    tree.add(1, [torch.ones(3), torch.ones(2)])  # what was refused left no trace
    assert_same(tree.finish()[1], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("indices", "arguments", "message"),
    [
        ((), {}, "nothing to sum"),
        ((0, 2, 5), {}, r"contributions \[1, 3, 4\] are missing: 3 contributions must have the indices 0 .. 2"),
        ((0,), {"divisor": 0}, "divisor is 0"),
        ((0,), {"outs": [torch.ones(3)]}, "there are 1 outs but the contributions have 2 tensors"),
        ((0,), {"outs": [torch.ones(3), torch.ones(3)]}, r"tensor 1: out has shape \(3,\)"),
        ((0,), {"outs": [torch.ones(3), torch.ones(2).half()]}, "tensor 1: out has dtype torch.float16"),
    ],
)
def test_refused_ends(indices: tuple[int, ...], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        added(*indices).finish(**arguments)


def test_the_end_is_once() -> None:
    tree = added(0)
    tree.finish()
    with pytest.raises(RuntimeError, match="finished"):
        tree.finish()
    with pytest.raises(RuntimeError, match="finished"):
        tree.add(1, [torch.ones(3), torch.ones(2)])
