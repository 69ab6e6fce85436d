"""The Triton sums: TensorFlow's bits, the bits of the reference, every shape, dtype, order and N."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from triton_env import (
    DEVICE,
    GOLDEN,
    IS_INTERPRETED,
    assert_rounded,
    assert_same,
    make,
    misaligned,
    needs_triton,
    poison,
    recorded_contribution,
)

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.ops import aggregate, aggregate_list
from tfstyle_dist_kernels import problems, reference
from tfstyle_dist_kernels.triton import triton_plan
from tfstyle_dist_kernels.triton.triton_sum import ORDERS, sum_lists

pytestmark = needs_triton
FLOATS = [torch.float32, torch.float64]
HALF = [torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, *HALF, torch.complex64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (3, 5), (511,), (512,), (1024,), (1301,)]
# Below, at and above a group of 8; one and several levels of the tree; 128 contributions are four levels.
COUNTS = [1, 2, 3, 5, 8, 9, 10, 16, 17, 31, 33, 64, 100]
with_order = pytest.mark.parametrize("order", ORDERS)


def expected_sum(contributions: list[Tensor], order: str, divisor: float | None = None) -> Tensor:
    """The sum by the reference, in the dtype it is accumulated in."""
    dtype = problems.accumulation_dtype(contributions[0].dtype)
    out = torch.empty(contributions[0].shape, dtype=dtype, device=DEVICE)
    return getattr(reference, order)([t.clone() for t in contributions], out, divisor=divisor)


@pytest.mark.parametrize("n", [*range(1, 34), 64])
def test_bits_are_tensorflows(n: int) -> None:
    contributions = [[recorded_contribution(j, size) for j in range(n)] for size in (1, 37)]
    for order, recorded in [("add_n", "sum"), ("accumulate_n", "chain")]:
        outs = [poison(row[0].shape, torch.float32) for row in contributions]
        sum_lists(contributions, outs, order)
        for size, out in zip((1, 37), outs, strict=True):
            assert out.cpu().numpy().tobytes().hex() == GOLDEN[f"size{size}_n{n}"][recorded]


@pytest.mark.slow
@given(
    n=st.integers(1, 64),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(ORDERS),
    divisor=st.sampled_from([None, 3, 0.7]),
    is_wide=st.booleans(),
    is_in_place=st.booleans(),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_sums_are_the_references(
    n: int,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    order: str,
    divisor: float | None,
    is_wide: bool,
    is_in_place: bool,
    data: st.DataObject,
) -> None:
    if not dtype.is_floating_point and not dtype.is_complex:
        divisor = None
    contributions = [make(n, shape, dtype, seed) for seed, shape in enumerate(shapes)]
    for row in contributions:
        if data.draw(st.booleans()):
            index = data.draw(st.integers(0, n - 1))
            row[index] = misaligned(row[index])
    expected = [expected_sum(row, order, divisor) for row in contributions]
    copies = [[t.clone() for t in row] for row in contributions]
    if is_in_place:
        outs = [data.draw(st.sampled_from(row)) for row in contributions]
    else:
        out_dtype = problems.accumulation_dtype(dtype) if is_wide else dtype
        outs = [poison(row[0].shape, out_dtype) for row in contributions]
    sum_lists(contributions, outs, order, divisor=divisor)
    for out, total in zip(outs, expected, strict=True):
        assert_rounded(out, total)
    for row, copied, out in zip(contributions, copies, outs, strict=True):
        for contribution, copy in zip(row, copied, strict=True):
            if contribution is not out:
                assert_same(contribution, copy)


@with_order
@pytest.mark.parametrize("n", COUNTS)
def test_counts(order: str, n: int) -> None:
    contributions = make(n, 600)
    out = poison(torch.Size([600]), torch.float32)
    sum_lists([contributions], [out], order)
    assert_same(out, expected_sum(contributions, order))


def test_orders_differ() -> None:
    contributions = make(20, 500)
    outs = [torch.empty(500, device=DEVICE) for _ in ORDERS]
    for out, order in zip(outs, ORDERS, strict=True):
        sum_lists([contributions], [out], order)
    assert not any(torch.equal(outs[i], outs[j]) for i, j in [(0, 1), (0, 2), (1, 2)])


def test_large_tree() -> None:
    contributions = make(300, 3)  # six levels of groups, the last of 4
    out = torch.empty(3, device=DEVICE)
    sum_lists([contributions], [out], "tree")
    assert_same(out, expected_sum(contributions, "tree"))


@with_order
def test_negative_zero_is_kept(order: str) -> None:
    contributions = [torch.full((5,), -0.0, device=DEVICE) for _ in range(20)]
    out = poison(torch.Size([5]), torch.float32)
    sum_lists([contributions], [out], order)
    assert torch.signbit(out).all()


@with_order
def test_nan_and_infinity(order: str) -> None:
    inf, nan = torch.inf, torch.nan
    contributions = [torch.zeros(4, device=DEVICE) for _ in range(20)]
    contributions[3].copy_(torch.tensor([inf, inf, nan, -inf]))
    contributions[17].copy_(torch.tensor([1.0, -inf, 1.0, -inf]))
    out = torch.empty(4, device=DEVICE)
    with np.errstate(invalid="ignore"):  # the interpreter computes with numpy, which warns of infinity - infinity
        sum_lists([contributions], [out], order)
    assert_same(out.cpu(), torch.tensor([inf, nan, nan, -inf]))


@with_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_out_is_any_contribution(order: str, dtype: torch.dtype) -> None:
    for n in (1, 2, 10):
        rows = [make(n, 600, dtype, seed) for seed in range(n)]
        expected = [expected_sum(row, order) for row in rows]
        sum_lists(rows, [row[position] for position, row in enumerate(rows)], order)
        for position, total in enumerate(expected):
            assert_rounded(rows[position][position], total)


@with_order
def test_the_same_contribution_twice(order: str) -> None:
    contributions = make(10, 100)
    contributions[7] = contributions[2]
    expected = expected_sum(contributions, order)
    sum_lists([contributions], [contributions[2]], order)
    assert_same(contributions[2], expected)


@with_order
@pytest.mark.parametrize("shift", [-1, 1, 4])
def test_out_overlaps_a_contribution_in_part(order: str, shift: int) -> None:
    memory = make(1, 1200)[0]
    others = make(2, 1000, seed=1)
    contributions = [others[0], memory[100:1100], others[1]]
    expected = expected_sum(contributions, order)
    out = memory[100 + shift : 1100 + shift]
    sum_lists([make(3, 7), contributions], [poison(torch.Size([7]), torch.float32), out], order)
    assert_same(out, expected)


def test_wide_out_over_the_memory_of_half_contributions() -> None:
    memory = torch.zeros(100, dtype=torch.float32, device=DEVICE)
    halves = [memory.view(torch.bfloat16)[:100].copy_(make(1, 100)[0]), *make(3, 100, torch.bfloat16)]
    expected = expected_sum(halves, "add_n")
    sum_lists([halves], [memory], "add_n")
    assert_same(memory, expected)


@with_order
def test_strides(order: str) -> None:
    plain = make(11, (12, 10))
    columns = [t.T.contiguous().T for t in plain]
    steps = [torch.stack([t, t], dim=-1)[..., 0] for t in plain]
    rows = [t[0].expand(12, 10) for t in plain]
    mixed = [*plain[:4], *columns[4:8], *steps[8:]]
    expected = expected_sum(plain, order)
    for contributions in (columns, steps, mixed):
        for out in (
            poison(torch.Size([12, 10]), torch.float32),
            poison(torch.Size([10, 12]), torch.float32).T,
            poison(torch.Size([12, 20]), torch.float32)[:, ::2],
        ):
            sum_lists([contributions], [out], order)
            assert_same(out, expected)
    out = poison(torch.Size([12, 10]), torch.float32)
    sum_lists([rows, plain], [out, plain[3]], order)
    assert_same(out, expected[0].expand(12, 10))
    assert_same(plain[3], expected)


def test_common_layouts_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [t.to(memory_format=torch.channels_last) for t in make(3, (2, 3, 4, 5))]
    out = torch.empty_like(images[0])

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor was copied")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", fail)
        patch.setattr(torch, "empty", fail)
        sum_lists([images], [out], "add_n")
    assert_same(out, expected_sum(images, "add_n"))


def test_interleaved_outputs_are_no_overlap() -> None:
    matrix = poison(torch.Size([30, 2]), torch.float32)
    rows = [make(3, 30, seed=seed) for seed in range(2)]
    sum_lists(rows, [matrix[:, 0], matrix[:, 1]], "tree")
    assert_same(matrix.T, torch.stack([expected_sum(row, "tree") for row in rows]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_and_negative_views(dtype: torch.dtype) -> None:
    contributions = make(3, 30, dtype)
    lazy = [t.conj() for t in contributions]
    expected = expected_sum([t.resolve_conj() for t in lazy], "add_n", 3)
    out = poison(torch.Size([30]), dtype)
    sum_lists([lazy], [out], "add_n", divisor=3)
    assert_same(out, expected)
    sum_lists([contributions], [out.conj()], "add_n", divisor=3)
    assert_same(out, expected)
    single = [t[:1].conj().imag for t in contributions]
    assert single[0].is_neg()
    assert single[0].is_contiguous()
    real = torch.empty(1, dtype=dtype.to_real(), device=DEVICE)
    sum_lists([single], [real], "add_n")
    assert_same(real, expected_sum([t.resolve_neg() for t in single], "add_n"))


@with_order
@pytest.mark.parametrize("dtype", FLOATS)
def test_divisor_divides_truly(order: str, dtype: torch.dtype) -> None:
    contributions = make(7, 1000, dtype)
    out = poison(torch.Size([1000]), dtype)
    sum_lists([contributions], [out], order, divisor=7)
    total = expected_sum(contributions, order)
    assert_same(out.cpu(), torch.from_numpy(total.cpu().numpy() / total.cpu().numpy().dtype.type(7)))
    assert not torch.equal(out, total * torch.tensor(1 / 7, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("divisor", [None, 3])
def test_scale_is_read_when_the_kernel_runs(dtype: torch.dtype, divisor: int | None) -> None:
    contributions = make(4, 100, dtype)
    total = expected_sum(contributions, "add_n")
    scale = torch.tensor([0.3], dtype=total.dtype, device=DEVICE)
    out = poison(torch.Size([100]), dtype)
    for value in (0.3, 1.7):
        scale.fill_(value)
        sum_lists([contributions], [out], "add_n", divisor=divisor, scale=scale)
        expected = total * scale
        assert_rounded(out, expected if divisor is None else reference.divide_(expected, divisor))


@with_order
@pytest.mark.parametrize("dtype", HALF)
def test_error_of_half_is_one_rounding(order: str, dtype: torch.dtype) -> None:
    # The stated bound: half a unit of the last place of the result (one where the interpreter cuts off), and the
    # roundings of the float32 additions.
    n = 32
    contributions = make(n, 2000, dtype)
    out = poison(torch.Size([2000]), dtype)
    sum_lists([contributions], [out], order, divisor=n)
    wide = torch.stack([t.double() for t in contributions])
    exact, magnitude = wide.sum(0) / n, wide.abs().sum(0) / n
    unit = torch.finfo(dtype).eps * (1.0 if IS_INTERPRETED else 0.5)
    bound = unit * exact.abs() + n * 2.0**-24 * magnitude + torch.finfo(dtype).smallest_normal * unit
    assert bool(((out.double() - exact).abs() <= bound).all())
    # Rounding after each addition, as TensorFlow does, breaks this bound.
    chain = contributions[0]
    for other in contributions[1:]:
        chain = chain + other
    assert bool(((chain.double() / n - exact).abs() > bound).any())


@with_order
def test_chunks_of_several_blocks(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plan, "ENOUGH_CHUNKS", 1)
    triton_plan.forget_plans()
    rows = [make(10, size) for size in (5, 4096, 4097, 10_001)]
    rows[1] = [misaligned(t) for t in rows[1]]
    outs = [poison(row[0].shape, torch.float32) for row in rows]
    sum_lists(rows, outs, order)
    triton_plan.forget_plans()
    for row, out in zip(rows, outs, strict=True):
        assert_same(out, expected_sum(row, order))


def test_hundreds_of_tensors() -> None:
    sizes = [(17 * i) % 41 for i in range(200)]
    rows = [make(3, size, seed=size) for size in sizes]
    outs = [poison(row[0].shape, torch.float32) for row in rows]
    sum_lists(rows, outs, "tree", divisor=3)
    for row, out in zip(rows, outs, strict=True):
        assert_same(out, expected_sum(row, "tree", 3))


def test_asked_for_by_name() -> None:
    lists = [make(2, 40, seed=seed) for seed in range(3)]
    out = poison(torch.Size([40]), torch.float32)
    columns = list(zip(*lists, strict=True))
    assert aggregate(columns[0], AggregationMethod.EXPERIMENTAL_TREE, out=out, backend="triton") is out
    assert_same(out, expected_sum(list(columns[0]), "tree"))
    for result, column in zip(aggregate_list(lists, divisor=3, backend="triton"), columns, strict=True):
        assert_same(result, expected_sum(list(column), "add_n", 3))


def test_nothing_to_do() -> None:
    sum_lists([], [], "add_n")
    empty = torch.empty(0, 3, device=DEVICE)
    sum_lists([[empty, empty], [empty]][:1], [torch.empty(0, 3, device=DEVICE)], "tree")


def test_no_gradient_is_recorded() -> None:
    contributions = [torch.ones(3, requires_grad=True, device=DEVICE) for _ in range(3)]
    out = torch.zeros(3, device=DEVICE)
    sum_lists([contributions], [out], "add_n")
    assert not out.requires_grad
    assert_same(out, torch.full((3,), 3.0, device=DEVICE))
