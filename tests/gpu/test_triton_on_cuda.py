"""The Triton sums on a real device: what the interpreter cannot show. Run with ``pytest -m gpu``.

On a machine with a CUDA device ``pytest tests/kernels`` runs compiled there, too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tfstyle_dist_kernels import reference
from tfstyle_dist_kernels.triton import triton_plan, triton_sum

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
with_order = pytest.mark.parametrize("order", triton_sum.ORDERS)


@pytest.fixture(autouse=True)
def _is_compiled() -> None:
    reason = triton_sum.unavailable()
    if reason is not None:
        pytest.skip(reason)
    if triton_sum.load_kernels().IS_INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was set when the kernels were loaded")


def make(n: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    scales = [2.0 ** (j % 7 - 3) for j in range(n)]
    return [torch.randn(size, generator=generator, device="cuda").mul_(scale).to(dtype) for scale in scales]


def expected_sum(contributions: list[Tensor], order: str, divisor: int | None = None) -> Tensor:
    # By the reference on the CPU: another device, another library.
    total = getattr(reference, order)([t.cpu() for t in contributions], divisor=divisor)
    return total.cuda()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@with_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("n", [1, 2, 8, 9, 16, 17, 33, 64])
def test_bits_are_those_of_the_cpu(order: str, dtype: torch.dtype, n: int) -> None:
    divisor = n if dtype.is_floating_point else None
    rows = [make(n, size, dtype, seed=size) for size in (1, 31, 4096, 100_003)]
    rows.append([torch.empty(1001, dtype=dtype, device="cuda")[1:].copy_(t) for t in make(n, 1000, dtype)])
    outs = [torch.full_like(row[0], torch.nan if dtype.is_floating_point else 99) for row in rows]
    triton_sum.sum_lists(rows, outs, order, divisor=divisor)
    for row, out in zip(rows, outs, strict=True):
        assert_same(out, expected_sum(row, order, divisor))


def test_more_than_2_to_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    size = 2**31 + 4099
    if free < 4 * size:
        pytest.skip(f"needs {4 * size} bytes of free device memory")
    a = torch.ones(size, dtype=torch.int8, device="cuda")
    b = torch.ones(size, dtype=torch.int8, device="cuda")
    b[-5:] = 3
    triton_sum.sum_lists([[a, b]], [a], "add_n")
    assert a[: 1 << 20].eq(2).all()
    assert a[2**31 - 3 : -5].eq(2).all()
    assert a[-5:].eq(4).all()


def test_a_plan_of_another_stream() -> None:
    rows, outs = [make(4, 1 << 20)], [torch.empty(1 << 20, device="cuda")]
    expected = expected_sum(rows[0], "add_n")
    triton_sum.sum_lists(rows, outs, "add_n")
    torch.cuda.synchronize()
    for _ in range(3):
        outs[0].fill_(torch.nan)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            triton_sum.sum_lists(rows, outs, "add_n")
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(outs[0], expected)


def test_plans_forgotten_while_the_device_is_busy() -> None:
    rows = [make(3, 1000, seed=seed) for seed in range(200)]
    outs = [torch.empty(1000, device="cuda") for _ in rows]
    torch.cuda._sleep(200_000_000)  # the sums below queue up behind it
    for row, out in zip(rows, outs, strict=True):
        triton_sum.sum_lists([row], [out], "tree")
        triton_plan.forget_plans()
    for row, out in zip(rows, outs, strict=True):
        assert_same(out, expected_sum(row, "tree"))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # what torch says of the capture that is refused
def test_cuda_graph() -> None:
    rows, outs = [make(4, 5000)], [torch.empty(5000, device="cuda")]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="were not summed before"), torch.cuda.graph(graph):
        triton_sum.sum_lists(rows, outs, "add_n")
    torch.cuda.synchronize()
    triton_sum.sum_lists(rows, outs, "add_n")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_sum.sum_lists(rows, outs, "add_n")
    triton_plan.forget_plans()
    for seed in (1, 2):
        for tensor, new in zip(rows[0], make(4, 5000, seed=seed), strict=True):
            tensor.copy_(new)
        graph.replay()
        assert_same(outs[0], expected_sum(rows[0], "add_n"))


def test_no_device_memory_beside_the_tables() -> None:
    rows, outs = [make(8, 1 << 22)], [torch.empty(1 << 22, device="cuda")]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    triton_sum.sum_lists(rows, outs, "tree")
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
