"""Every backend of the CPU against TensorFlow's recorded bits, the plain sums and each other."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st
from sum_oracles import DTYPES, GOLDEN, HALF, ORDERS, assert_same, make, recorded_contribution
from torch import Tensor

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.ops import aggregate, aggregate_list
from tfstyle_dist_kernels import problems, reference
from tfstyle_dist_kernels.cpu import cpu_steps, cpu_sum, cpu_threads
from tfstyle_dist_kernels.triton import triton_sum

METHODS = {
    "add_n": AggregationMethod.ADD_N,
    "tree": AggregationMethod.TREE,
    "accumulate_n": AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
}
BACKENDS = {"llvm": cpu_sum.sum_lists, "torch": reference.sum_lists}
with_backend = pytest.mark.parametrize("backend", BACKENDS)
with_order = pytest.mark.parametrize("order", ORDERS)


def nan_like(tensor: Tensor) -> Tensor:
    """An output whose old values would be seen if they were used."""
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() or tensor.is_complex() else 77)


@with_backend
def test_bits_are_tensorflows(backend: str) -> None:
    assert len(GOLDEN) == 68
    for case, recorded in GOLDEN.items():
        size, n = (int(part.lstrip("sizen")) for part in case.split("_"))
        contributions = [recorded_contribution(j, size) for j in range(n)]
        for order, key in (("add_n", "sum"), ("accumulate_n", "chain")):
            total = aggregate(contributions, METHODS[order], backend=backend, out=nan_like(contributions[0]))
            assert total.numpy().tobytes().hex() == recorded[key], f"{case} {order}"


@with_backend
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_orders(backend: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 64))
    order = data.draw(st.sampled_from(sorted(ORDERS)))
    dtype = data.draw(st.sampled_from([*DTYPES, *HALF, torch.int8, torch.int16, torch.complex128]))
    shapes = data.draw(
        st.lists(st.sampled_from([(), (1,), (31,), (32,), (3, 43), (2, 0), (700,)]), min_size=1, max_size=4)
    )
    can_divide = dtype.is_floating_point or dtype.is_complex
    divisor = data.draw(st.sampled_from([None, 3, 0.7])) if can_divide else None
    lists = [make(n, shape, dtype, seed) for seed, shape in enumerate(shapes)]
    outs = [nan_like(parts[0]) for parts in lists]
    BACKENDS[backend](lists, outs, order, divisor=divisor)
    for parts, out in zip(lists, outs, strict=True):
        wide = ORDERS[order]([t.to(problems.accumulation_dtype(dtype)) for t in parts])
        assert_same(out, (wide if divisor is None else reference.divide_(wide.clone(), divisor)).to(dtype))


@with_backend
@with_order
def test_more_than_a_unit_of_work(backend: str, order: str) -> None:
    for dtype, size in ((torch.float32, 70_001), (torch.bfloat16, 70_001), (torch.float64, 33_333)):
        lists = [make(20, size, dtype), make(20, 5, dtype)]
        outs = [nan_like(parts[0]) for parts in lists]
        BACKENDS[backend](lists, outs, order, divisor=20)
        for parts, out in zip(lists, outs, strict=True):
            wide = ORDERS[order]([t.to(problems.accumulation_dtype(dtype)) for t in parts])
            assert_same(out, (wide / 20).to(dtype))


@with_backend
@with_order
def test_views_in_any_strides(backend: str, order: str) -> None:
    plain = make(17, (12, 10))
    expected = ORDERS[order](plain)
    columns = [t.T.contiguous().T for t in plain]
    steps = [torch.stack([t, t], dim=-1)[..., 0] for t in plain]
    odd = [torch.cat([torch.zeros(1), t.reshape(-1)])[1:].view(12, 10) for t in plain]  # not aligned to 16 bytes
    for contributions in (columns, steps, odd, [*plain[:5], *columns[5:10], *steps[10:]]):
        assert_same(aggregate(contributions, METHODS[order], backend=backend), expected)
        for out in (torch.full((12, 10), torch.nan), torch.full((10, 12), torch.nan).T):
            aggregate(contributions, METHODS[order], out=out, backend=backend)
            assert_same(out, expected)
    rows = [t[0].expand(12, 10) for t in plain]
    assert_same(aggregate(rows, METHODS[order], backend=backend), expected[0].expand(12, 10))
    images = [t.to(memory_format=torch.channels_last) for t in make(3, (2, 3, 4, 5))]
    total = aggregate(images, METHODS[order], backend=backend)
    assert total.is_contiguous(memory_format=torch.channels_last)
    assert_same(total, ORDERS[order](images))


@with_backend
@with_order
def test_out_shares_memory(backend: str, order: str) -> None:
    for n in (1, 2, 3, 9, 18):
        for dtype in (torch.float32, torch.bfloat16):
            for position in range(n):
                contributions = make(n, 150, dtype)
                wide = ORDERS[order]([t.float() for t in contributions])
                aggregate(contributions, METHODS[order], out=contributions[position], backend=backend)
                assert_same(contributions[position], wide.to(dtype))
        memory = make(1, 102)[0]
        contributions = [memory[1:101], *make(n - 1, 100, seed=1)]
        expected = ORDERS[order]([t.clone() for t in contributions])
        assert_same(aggregate(contributions, METHODS[order], out=memory[2:], backend=backend), expected)
    memory = torch.zeros(100)
    halves = [memory.view(torch.bfloat16)[:100].copy_(make(1, 100)[0]), *make(3, 100, torch.bfloat16)]
    expected = ORDERS[order]([t.float() for t in halves])
    assert_same(aggregate(halves, METHODS[order], out=memory, backend=backend), expected)


@with_backend
def test_half_into_float32(backend: str) -> None:
    for dtype in HALF:
        contributions = make(9, 333, dtype)
        expected = ORDERS["add_n"]([t.float() for t in contributions])
        assert_same(aggregate(contributions, out=torch.full((333,), torch.nan), backend=backend), expected)


@with_backend
def test_error_of_bfloat16_is_one_rounding(backend: str) -> None:
    # float32 adds the rounding errors of N - 1 sums, which are small next to half a unit of bfloat16.
    for n in (2, 9, 64):
        contributions = make(n, 5000, torch.bfloat16, seed=n)
        exact = torch.stack([t.double() for t in contributions]).sum(0)
        total = aggregate(contributions, backend=backend).double()
        magnitude = torch.stack([t.double().abs() for t in contributions]).sum(0)
        bound = exact.abs() * 2.0**-8 * 1.001 + magnitude * (n - 1) * 2.0**-24
        assert bool(((total - exact).abs() <= bound).all())


@with_backend
def test_rounding_of_bfloat16_ties_and_specials(backend: str) -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-40, -0.0])
    parts = [values.bfloat16(), (values - values.bfloat16().float()).nan_to_num(0).bfloat16()]
    expected = (parts[0].float() + parts[1].float()).bfloat16()
    assert_same(aggregate(parts, backend=backend), expected)
    both = [torch.tensor([torch.inf]), torch.tensor([-torch.inf])]
    assert aggregate(both, backend=backend).isnan().all()


@with_backend
def test_lists_with_none_and_sparse(backend: str) -> None:
    rows = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 4]]), torch.tensor([1.0, 2.0, 3.0]), (6,), check_invariants=True
    )
    replicas: list[list[Tensor | None]] = [
        [torch.full((4,), float(r)), rows, None if r == 1 else torch.ones(3) * r, rows if r else torch.ones(6)]
        for r in range(3)
    ]
    dense, sparse, two, mixed = aggregate_list(replicas, divisor=3, backend=backend)
    assert_same(dense, torch.full((4,), 1.0))
    assert sparse.is_sparse
    assert_same(sparse.to_dense(), rows.to_dense())
    assert_same(two, torch.full((3,), 2.0) / 3)
    assert_same(mixed, (torch.ones(6) + rows.to_dense() + rows.to_dense()) / 3)


def test_a_list_is_one_call_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(contributions: list[list[Tensor]], outs: list[Tensor], order: str, **rest: object) -> None:
        calls.append([tuple(out.shape) for out in outs])
        reference.sum_lists(contributions, outs, order)

    monkeypatch.setattr(cpu_sum, "sum_lists", counting)
    replicas = [[torch.ones(2), torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(5)] for _ in range(2)]
    aggregate_list(replicas, backend="llvm")
    assert calls == [[(2,), (3,), (5,)], [(4,)]]


def test_several_threads_share_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sum, "SHARED_ABOVE_BYTES", 0)
    torch.set_num_threads(4)
    lists = [make(9, size) for size in (200_000, 3, 0, 90_001)]
    for _ in range(20):
        outs = [nan_like(parts[0]) for parts in lists]
        cpu_sum.sum_lists(lists, outs, "tree")
        for parts, out in zip(lists, outs, strict=True):
            assert_same(out, reference.tree(parts))


def test_callers_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sum, "SHARED_ABOVE_BYTES", 0)
    wrong: list[object] = []

    def sum_often(seed: int) -> None:
        torch.set_num_threads(3)
        contributions = make(11, 60_000, seed=seed)
        expected = reference.add_n(contributions)
        for _ in range(30):
            out = nan_like(expected)
            cpu_sum.sum_lists([contributions], [out], "add_n")
            if not torch.equal(out, expected):
                wrong.append(seed)

    threads = [threading.Thread(target=sum_often, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_one_thread_takes_the_shares_of_those_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_alone(team: cpu_threads.Team, function: int, argument: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)

    monkeypatch.setattr(cpu_threads.Team, "run", run_alone)
    monkeypatch.setattr(cpu_sum, "SHARED_ABOVE_BYTES", 0)
    torch.set_num_threads(3)
    contributions = make(3, 200_000)
    assert_same(aggregate(contributions, backend="llvm"), reference.add_n(contributions))


def test_kept_plans_are_of_the_same_sizes_and_dtypes() -> None:
    memory = torch.randn(4, 4000)
    for count in (4000, 1000, 3999):
        parts, out = [m[:count] for m in memory[:3]], memory[3, :count]
        assert_same(aggregate(parts, out=out, backend="llvm"), reference.add_n(parts))
    wide = [m.view(torch.float64) for m in memory[:3]]
    out = memory[3].view(torch.float64)
    assert_same(aggregate(wide, out=out, backend="llvm"), reference.add_n(wide))


def test_in_place_changes_are_seen_by_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    buffer = torch.ones(3)
    loss = (weight * buffer).sum()
    aggregate(make(2, 3), out=buffer, backend="llvm")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown backend 'gpu'"):
        aggregate(make(2, 3), backend="gpu")
    with pytest.raises(InvalidArgumentError, match=r"backend='llvm' .* on meta"):
        aggregate([torch.ones(3, device="meta")] * 2, backend="llvm")
    if triton_sum.unavailable() is not None:  # the tests of the kernels load them interpreted
        with pytest.raises(InvalidArgumentError, match="backend='triton' was asked for, but"):
            aggregate(make(2, 3), backend="triton")
    with pytest.raises(ValueError, match="unknown order 'sum'"):
        cpu_sum.sum_lists([make(2, 3)], [torch.empty(3)], "sum")
    with pytest.raises(ValueError, match=r"\[2, 3\] contributions"):
        cpu_sum.sum_lists([make(2, 3), make(3, 3)], [torch.empty(3)] * 2, "add_n")
    with pytest.raises(ValueError, match="2 tensors have contributions but 1 outputs"):
        cpu_sum.sum_lists([make(2, 3)] * 2, [torch.empty(3)], "add_n")


@with_order
def test_steps_are_the_orders(order: str) -> None:
    """The kernel's programs, run on strings: every contribution once, in the shape of the plain sum."""

    def added(parts: list[str]) -> str:
        total = parts[0]
        for part in parts[1:]:
            total = f"({total}+{part})"
        return total

    def pairwise(parts: list[str]) -> str:
        return (
            parts[0]
            if len(parts) == 1
            else added([pairwise(parts[: len(parts) // 2]), pairwise(parts[len(parts) // 2 :])])
        )

    class Name(str):
        def __add__(self, other: str) -> Name:
            return Name(f"({self}+{other})")

    for n in range(1, 130):
        rows, num_levels = cpu_steps.steps(n, order)
        levels: dict[int, str] = {}
        for first, last, shape, start, low, high, target in rows:
            parts = [str(index) for index in range(first, last)]
            if shape != cpu_steps.CHAIN:
                assert len(parts) == shape
                total = pairwise(parts)
            else:
                total = added([levels[start], *parts] if start >= 0 else parts)
            for level in range(high - 1, low - 1, -1):
                total = added([levels[level], total])
            levels[target] = total
        assert max(levels) < num_levels
        assert levels[cpu_steps.OUT] == ORDERS[order]([Name(index) for index in range(n)])  # type: ignore[arg-type]
