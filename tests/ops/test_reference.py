"""The pure-torch sums against TensorFlow's recorded bits and against oracles written here."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sum_oracles import (
    DTYPES,
    GOLDEN,
    HALF,
    add_n_oracle,
    assert_same,
    chain_oracle,
    make,
    recorded_contribution,
    tree_oracle,
)
from torch import Tensor

from tfstyle_dist_kernels import problems, reference

SUMS = [reference.add_n, reference.tree, reference.accumulate_n]
ORACLES = list(zip(SUMS, [add_n_oracle, tree_oracle, chain_oracle], strict=True))
with_oracle = pytest.mark.parametrize(("total", "oracle"), ORACLES, ids=[f.__name__ for f in SUMS])
with_total = pytest.mark.parametrize("total", SUMS, ids=[f.__name__ for f in SUMS])


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes above 128 bytes, so that small tensors take the path of large ones."""
    monkeypatch.setattr(reference, "BLOCKED_ABOVE_BYTES", 128)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 64)


def test_recording_is_complete() -> None:
    assert len(GOLDEN) == 68
    assert sum(case["sum"] != case["chain"] for case in GOLDEN.values()) > 20


@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.parametrize("blocked", [False, True])
def test_bits_are_tensorflows(case: str, blocked: bool, request: pytest.FixtureRequest) -> None:
    if blocked:
        request.getfixturevalue("tiny_blocks")
    size, n = (int(part.lstrip("sizen")) for part in case.split("_"))
    contributions = [recorded_contribution(j, size) for j in range(n)]
    assert reference.add_n(contributions).numpy().tobytes().hex() == GOLDEN[case]["sum"]
    assert reference.accumulate_n(contributions).numpy().tobytes().hex() == GOLDEN[case]["chain"]


@given(
    n=st.integers(1, 70),
    shape=st.sampled_from([(), (1,), (17,), (3, 5), (2, 0)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 5),
)
@settings(max_examples=120, deadline=None)
def test_orders(n: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    contributions = make(n, shape, dtype, seed)
    copies = [t.clone() for t in contributions]
    for total, oracle in ORACLES:
        assert_same(total(contributions), oracle(contributions))
    for contribution, copy in zip(contributions, copies, strict=True):
        assert_same(contribution, copy)


def test_orders_differ() -> None:
    contributions = make(20, 500)
    results = [total(contributions) for total in SUMS]
    assert not any(torch.equal(results[i], results[j]) for i, j in [(0, 1), (0, 2), (1, 2)])


@with_oracle
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("n", [1, 2, 3, 9, 10, 33])
def test_half_is_summed_in_float32_and_rounded_once(
    total: Callable[..., Tensor], oracle: Callable[..., Tensor], dtype: torch.dtype, n: int
) -> None:
    contributions = make(n, 200, dtype)
    wide = oracle([t.float() for t in contributions])
    assert_same(total(contributions), wide.to(dtype))
    assert_same(total(contributions, torch.full((200,), torch.nan, dtype=torch.float32)), wide)
    # Dividing before the rounding: dividing the rounded sum would round twice.
    assert_same(total(contributions, divisor=3), (wide / 3).to(dtype))


@with_total
@pytest.mark.parametrize("dtype", HALF)
def test_error_of_half_is_one_rounding(total: Callable[..., Tensor], dtype: torch.dtype) -> None:
    # Multiples of 2**-4 below 2**6: every partial sum is exact in float32, so only the last rounding is left.
    contributions = [(t * 16).round().clamp(-512, 512).to(dtype) / 16 for t in make(33, 100)]
    exact = [sum(Fraction(t[i].item()) for t in contributions) for i in range(100)]
    rounded = torch.tensor([float(value) for value in exact], dtype=torch.float64).to(dtype)
    assert_same(total(contributions), rounded)


@with_oracle
@pytest.mark.parametrize("size", [31, 32, 33, 47, 48, 49, 64, 65, 200])
@pytest.mark.parametrize("n", [1, 2, 5, 17, 24])
@pytest.mark.usefixtures("tiny_blocks")
def test_blocks_keep_the_bits(total: Callable[..., Tensor], oracle: Callable[..., Tensor], size: int, n: int) -> None:
    contributions = make(n, size)
    assert_same(total(contributions), oracle(contributions))
    halves = make(n, size, torch.bfloat16)
    assert_same(total(halves), oracle([t.float() for t in halves]).bfloat16())
    assert_same(total(contributions, divisor=7), oracle(contributions) / 7)


@with_oracle
@pytest.mark.parametrize("extra", [-1, 0, 1, (1 << 18) + 1])
def test_real_block_limit(
    total: Callable[..., Tensor], oracle: Callable[..., Tensor], extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = reference.BLOCKED_ABOVE_BYTES // 4 + extra
    contributions = make(3, size) * 4
    expected = oracle(contributions)
    assert_same(total(contributions), expected)
    monkeypatch.setattr(reference, "BLOCKED_ABOVE_BYTES", 1 << 40)
    assert_same(total(contributions), expected)


def test_blocks_are_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCKED_ABOVE_BYTES", 128)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 64)

    def sizes(*tensors: Tensor) -> list[int]:
        return [block[0].numel() for block in reference._blocks(list(tensors), torch.float32)]

    assert sizes(torch.ones(32)) == [32]
    assert sizes(torch.ones(40), torch.ones(40)) == [16, 16, 8]
    assert sizes(torch.ones(8, 5).T) == [16, 16, 8]
    assert sizes(torch.ones(2, 3, 4, 2).to(memory_format=torch.channels_last)) == [16, 16, 16]
    assert sizes(torch.ones(8, 5).T, torch.ones(5, 8)) == [40]
    assert sizes(torch.ones(80)[::2]) == [40]


@with_oracle
@pytest.mark.parametrize("blocked", [False, True])
def test_strides(
    total: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    blocked: bool,
    request: pytest.FixtureRequest,
) -> None:
    if blocked:
        request.getfixturevalue("tiny_blocks")
    plain = make(17, (12, 10))
    columns = [t.T.contiguous().T for t in plain]
    steps = [torch.stack([t, t], dim=-1)[..., 0] for t in plain]
    mixed = [*plain[:5], *columns[5:10], *steps[10:]]
    expected = oracle(plain)
    for contributions in (columns, steps, mixed):
        assert_same(total(contributions), expected)
    out = torch.full((10, 12), torch.nan).T
    assert total(plain, out) is out
    assert_same(out, expected)
    rows = [t[0].expand(12, 10) for t in plain]
    assert_same(total(rows), expected[0].expand(12, 10))


def test_result_keeps_the_layout() -> None:
    images = [t.to(memory_format=torch.channels_last) for t in make(3, (2, 3, 4, 5))]
    assert reference.add_n(images).is_contiguous(memory_format=torch.channels_last)


@with_oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64])
@pytest.mark.parametrize("blocked", [False, True])
def test_out_is_a_contribution(
    total: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    dtype: torch.dtype,
    blocked: bool,
    request: pytest.FixtureRequest,
) -> None:
    if blocked:
        request.getfixturevalue("tiny_blocks")
    for n in (1, 2, 3, 4, 9, 18):
        expected = oracle([t.to(problems.accumulation_dtype(dtype)) for t in make(n, 150, dtype)]).to(dtype)
        for position in range(n):
            contributions = make(n, 150, dtype)
            out = contributions[position]
            assert total(contributions, out) is out
            assert_same(out, expected)


@with_oracle
@pytest.mark.parametrize("blocked", [False, True])
def test_out_overlaps(
    total: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    blocked: bool,
    request: pytest.FixtureRequest,
) -> None:
    if blocked:
        request.getfixturevalue("tiny_blocks")

    def shifted(memory: Tensor, position: int, n: int) -> list[Tensor]:
        return [memory[1:101] if j == position else t for j, t in enumerate(make(n, 100, seed=1))]

    for n in (1, 2, 5, 18):
        for position in {0, 1 % n, n - 1}:
            memory = make(1, 102)[0]
            contributions = shifted(memory, position, n)
            expected = oracle([t.clone() for t in contributions])
            out = memory[2:]
            total(contributions, out)
            assert_same(out, expected)
    same_twice = make(6, 100)
    same_twice[4] = same_twice[0]
    expected = oracle([t.clone() for t in same_twice])
    assert_same(total(same_twice, same_twice[0]), expected)
    square = make(4, (10, 10))
    square[2] = square[0].T
    expected = oracle([t.clone() for t in square])
    assert_same(total(square, square[0]), expected)


def test_wide_out_over_the_memory_of_half_contributions() -> None:
    memory = torch.zeros(100, dtype=torch.float32)
    halves = [memory.view(torch.bfloat16)[:100].copy_(make(1, 100)[0]), *make(3, 100, torch.bfloat16)]
    expected = add_n_oracle([t.float() for t in halves])
    assert_same(reference.add_n(halves, memory), expected)


@with_total
@pytest.mark.parametrize("dtype", [*DTYPES, *HALF])
def test_one_contribution_is_copied(total: Callable[..., Tensor], dtype: torch.dtype) -> None:
    contribution = make(1, 20, dtype)[0]
    result = total([contribution])
    assert_same(result, contribution)
    assert result.data_ptr() != contribution.data_ptr()


@with_total
def test_nan_and_infinity(total: Callable[..., Tensor]) -> None:
    inf, nan = torch.inf, torch.nan
    contributions = [torch.zeros(4) for _ in range(20)]
    contributions[3] = torch.tensor([inf, inf, nan, -inf])
    contributions[17] = torch.tensor([1.0, -inf, 1.0, -inf])
    assert_same(total(contributions), torch.tensor([inf, nan, nan, -inf]))
    # What the memory of a new output or of an earlier temporary holds must not matter.
    assert_same(total(make(20, 4), torch.full((4,), nan)), total(make(20, 4)))


@with_total
def test_conjugate_views(total: Callable[..., Tensor]) -> None:
    contributions = make(11, 30, torch.complex64)
    contributions = [t * (1 + 2j) for t in contributions]
    lazy = [t.conj() for t in contributions]
    expected = total([t.resolve_conj() for t in lazy], divisor=3)
    assert_same(total(lazy, divisor=3), expected)
    out = torch.zeros(30, dtype=torch.complex64)
    total(contributions, out.conj(), divisor=3)
    assert_same(out, expected)
    assert_same(total(lazy, contributions[0], divisor=3), expected)


@with_oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divisor_divides_truly(total: Callable[..., Tensor], oracle: Callable[..., Tensor], dtype: torch.dtype) -> None:
    contributions = make(7, 1000, dtype)
    expected = oracle(contributions).numpy() / np.asarray(7, dtype=oracle(contributions).numpy().dtype)
    result = total(contributions, divisor=7)
    assert_same(result, torch.from_numpy(expected))
    assert not torch.equal(result, oracle(contributions) * torch.tensor(1 / 7, dtype=dtype))


def test_divisor_of_complex_divides_the_components() -> None:
    contributions = [t * (1 + 2j) for t in make(5, 100, torch.complex64)]
    expected = torch.view_as_complex(torch.view_as_real(add_n_oracle(contributions)) / 7)
    assert_same(reference.add_n(contributions, divisor=7), expected)


def test_no_gradient_is_recorded() -> None:
    contributions = [torch.ones(3, requires_grad=True) for _ in range(10)]
    out = torch.zeros(3, requires_grad=True)
    assert not reference.add_n(contributions).requires_grad
    assert_same(reference.add_n(contributions, out).detach(), torch.full((3,), 10.0))
    assert out.is_leaf


@with_total
@pytest.mark.parametrize(
    ("contributions", "arguments", "message"),
    [
        ([], {}, "nothing to sum"),
        (
            [torch.ones(4), torch.ones(4), torch.ones(3)],
            {},
            r"contribution 2 has shape \(3,\) but .* has \(4,\)",
        ),
        ([torch.ones(4), torch.ones(4).double()], {}, "contribution 1 has dtype torch.float64 but"),
        ([torch.ones(4), torch.ones(4, device="meta")], {}, "contribution 1 is on device meta but"),
        ([torch.ones(4).bool()] * 2, {}, "contribution 0 has dtype torch.bool"),
        ([torch.ones(4).to_sparse()] * 2, {}, "sparse"),
        ([torch.ones(4)], {"out": torch.ones(1)}, r"out has shape \(1,\)"),
        ([torch.ones(4)], {"out": torch.ones(4).double()}, "out has dtype torch.float64"),
        ([torch.ones(4)], {"out": torch.ones(4, device="meta")}, "out is on device meta"),
        ([torch.ones(4)], {"divisor": 0}, "divisor is 0"),
        ([torch.ones(4).int()], {"divisor": 2}, "torch.int32 cannot be divided by 2"),
    ],
)
def test_refusals(
    total: Callable[..., Tensor], contributions: list[Tensor], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        total(contributions, **arguments)
