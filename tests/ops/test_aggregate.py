"""``aggregate``, ``aggregate_list`` and ``explain``."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops import aggregate, aggregate_columns, aggregate_list, explain
from tfstyle_dist_kernels import reference

METHODS = {
    AggregationMethod.ADD_N: reference.add_n,
    AggregationMethod.TREE: reference.tree,
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: reference.accumulate_n,
}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def make(n: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 2.0 ** (j % 7 - 3) for j in range(n)]


def sparse(indices: list[int], values: list[float] | Tensor, size: int = 6) -> Tensor:
    values = torch.as_tensor(values)
    shape = (size, *values.shape[1:])
    return torch.sparse_coo_tensor(torch.tensor([indices]), values, shape, check_invariants=True)


@pytest.mark.parametrize("method", METHODS)
def test_method_chooses_the_order(method: int) -> None:
    contributions = make(20, 300)
    assert_same(aggregate(contributions, method), METHODS[method](contributions))
    others = [other for other in METHODS if other != method]
    assert not any(torch.equal(aggregate(contributions, method), aggregate(contributions, m)) for m in others)


def test_default_is_add_n() -> None:
    contributions = make(20, 300)
    assert_same(aggregate(contributions), reference.add_n(contributions))
    assert_same(aggregate(contributions, None), reference.add_n(contributions))


def test_none_is_skipped() -> None:
    a, b = make(2, 5)
    assert_same(aggregate([None, a, None, b, None]), a + b)


def test_result_is_new() -> None:
    contribution = make(1, 5)[0]
    result = aggregate([None, contribution])
    result.zero_()
    assert contribution.count_nonzero() == 5


def test_out_and_divisor() -> None:
    contributions = make(3, 5)
    out = torch.full((5,), torch.nan)
    assert aggregate(contributions, out=out, divisor=3) is out
    assert_same(out, (contributions[0] + contributions[1] + contributions[2]) / 3)
    expected = reference.tree([t.clone() for t in contributions])
    aggregate(contributions, AggregationMethod.TREE, out=contributions[2])
    assert_same(contributions[2], expected)


def test_half_into_float32() -> None:
    contributions = [t.bfloat16() for t in make(9, 50)]
    expected = reference.add_n([t.float() for t in contributions])
    assert_same(aggregate(contributions, out=torch.empty(50)), expected)
    assert_same(aggregate(contributions, divisor=9), (expected / 9).bfloat16())


def test_integers_wrap_and_are_not_divided() -> None:
    big = torch.tensor([2**31 - 1], dtype=torch.int32)
    assert_same(aggregate([big, torch.ones_like(big)]), torch.tensor([-(2**31)], dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match=r"torch\.int32 cannot be divided by 2"):
        aggregate([big], divisor=2)


def test_no_gradient_is_recorded() -> None:
    weights = [torch.nn.Parameter(t) for t in make(2, 3)]
    result = aggregate(weights)
    assert not result.requires_grad
    assert type(result) is Tensor


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    contributions = make(10, *shape)
    assert_same(aggregate(contributions, divisor=2), reference.add_n(contributions) / 2)


@pytest.mark.parametrize(
    ("contributions", "message"),
    [
        ([], "nothing to sum"),
        ([None, None], "all 2 contributions are None"),
        (
            [torch.ones(4), None, torch.ones(3)],
            r"contribution 2 has shape \(3,\) but contribution 0 has \(4,\)",
        ),
        (
            [None, torch.ones(4), torch.ones(4, 1)],
            r"contribution 2 has shape \(4, 1\) but contribution 1",
        ),
        (
            [torch.ones(4), None, torch.ones(4).half()],
            "contribution 2 has dtype torch.float16 but",
        ),
        (
            [torch.ones(4), torch.ones(4, device="meta")],
            "contribution 1 is on device meta but",
        ),
        ([None, torch.ones(4) > 0], "contribution 1 has dtype torch.bool"),
        ([None, sparse([1], [1.0]), sparse([1], [1.0], 5)], r"contribution 2 has shape \(5,\)"),
        (
            [sparse([1], torch.ones(1, 6)), None, torch.ones(6, 6).to_sparse()],
            "contribution 2 has 2 sparse dimensions but contribution 0 has 1",
        ),
    ],
)
def test_refusals(contributions: list[Tensor | None], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        aggregate(contributions)


def test_refusals_of_out_and_divisor() -> None:
    with pytest.raises(InvalidArgumentError, match="out has shape"):
        aggregate(make(2, 4), out=torch.empty(3))
    with pytest.raises(InvalidArgumentError, match=r"out has dtype torch\.float16"):
        aggregate(make(2, 4), out=torch.empty(4, dtype=torch.float16))
    with pytest.raises(InvalidArgumentError, match="must be dense"):
        aggregate(make(2, 6), out=sparse([1], [1.0]))
    with pytest.raises(InvalidArgumentError, match="divisor is 0"):
        aggregate(make(2, 4), divisor=0)


def test_refusals_of_types() -> None:
    with pytest.raises(TypeError, match="contribution 1 is a float"):
        aggregate([torch.ones(()), 1.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one tensor, not a sequence"):
        aggregate(torch.ones(3, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [7, -1, "tree"])
def test_unknown_method(method: int) -> None:
    with pytest.raises(ValueError, match="aggregation_method"):
        aggregate(make(2, 3), method)
    with pytest.raises(ValueError, match="aggregation_method"):
        aggregate_list([make(2, 3)], method)
    with pytest.raises(ValueError, match="aggregation_method"):
        explain(2, 8, torch.float32, method)


def test_sparse_is_coalesced() -> None:
    result = aggregate([sparse([4, 1], [2.0, 1.0]), None, sparse([1], [5.0]), sparse([5, 1], [3.0, -2.0])])
    assert result.is_sparse
    assert result.is_coalesced()
    assert_same(result.indices(), torch.tensor([[1, 4, 5]]))
    assert_same(result.values(), torch.tensor([4.0, 2.0, 3.0]))


def test_sparse_rows_with_many_duplicates() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 50, (400,), generator=generator) for _ in range(4)]
    # Whole numbers, whose sums are exact: torch.Tensor.coalesce promises no order.
    values = [(t * 16).round()[:, None].expand(400, 3) for t in make(4, 400)]
    expected = torch.zeros(50, 3)
    for indices, entries in zip(rows, values, strict=True):
        for index, entry in zip(indices.tolist(), entries, strict=True):
            expected[index] += entry
    contributions = [sparse(i.tolist(), v, 50) for i, v in zip(rows, values, strict=True)]
    assert_same(aggregate(contributions).to_dense(), expected)


def test_sparse_mean_and_half() -> None:
    third = aggregate([sparse([0, 2], [1.0, 2.0]), sparse([2], [5.0])], divisor=3)
    assert_same(third.to_dense(), torch.tensor([1.0, 0, 7.0, 0, 0, 0]) / 3)
    # 256 + 1 is 256 in bfloat16; in float32, rounded once, 256 + 1 + 1 is 258.
    steps = [sparse([3], [value]).bfloat16() for value in (256.0, 1.0, 1.0)]
    result = aggregate(steps)
    assert result.dtype == torch.bfloat16
    assert_same(result.values(), torch.tensor([258.0], dtype=torch.bfloat16))


def test_sparse_result_is_new() -> None:
    contribution = sparse([0, 2], [1.0, 2.0]).coalesce()
    result = aggregate([contribution], divisor=1)
    result.values().zero_()
    assert_same(contribution.values(), torch.tensor([1.0, 2.0]))


def test_empty_sparse() -> None:
    nothing = sparse([], torch.empty(0, 2))
    assert_same(aggregate([nothing, nothing], divisor=2).to_dense(), torch.zeros(6, 2))


def test_sparse_and_dense() -> None:
    dense = make(1, 6)[0]
    rows = sparse([1, 1, 4], [1.0, 2.0, 3.0])
    result = aggregate([rows, None, dense])
    assert result.layout == torch.strided
    assert_same(result, rows.to_dense() + dense)
    out = torch.empty(6)
    assert aggregate([rows, rows], out=out, divisor=2) is out
    assert_same(out, rows.to_dense())


def test_list_equals_the_loop() -> None:
    replicas = [[*make(2, 4, seed=r), make(1, 3, 5, seed=r)[0], torch.tensor(r)] for r in range(10)]
    for method in METHODS:
        expected = [aggregate(list(tensors), method) for tensors in zip(*replicas, strict=True)]
        for result, tensor in zip(aggregate_list(replicas, method), expected, strict=True):
            assert_same(result, tensor)


def test_list_with_outs_and_divisor() -> None:
    replicas = [make(3, 4, seed=r) for r in range(2)]
    expected = [(a + b) / 2 for a, b in zip(*replicas, strict=True)]
    outs = replicas[1]
    results = aggregate_list(replicas, outs=outs, divisor=2)
    assert all(result is out for result, out in zip(results, outs, strict=True))
    for result, tensor in zip(results, expected, strict=True):
        assert_same(result, tensor)


def test_list_of_no_tensors() -> None:
    assert aggregate_list([[], []]) == []


def test_list_refuses_before_it_writes() -> None:
    replicas = [make(2, 4), [torch.ones(4), torch.ones(3)]]
    outs = [torch.full((4,), 7.0) for _ in range(2)]
    with pytest.raises(InvalidArgumentError, match=r"tensor 1 of the list: contribution 1 has shape \(3,\)"):
        aggregate_list(replicas, outs=outs)
    assert_same(outs[0], torch.full((4,), 7.0))
    with pytest.raises(InvalidArgumentError, match="replica 1 gives 1 tensors but replica 0 gives 2"):
        aggregate_list([make(2, 4), make(1, 4)])
    with pytest.raises(InvalidArgumentError, match="outs has 1 tensors but every replica gives 2"):
        aggregate_list([make(2, 4), make(2, 4)], outs=[torch.empty(4)])
    with pytest.raises(InvalidArgumentError, match="nothing to sum"):
        aggregate_list([])


def test_columns_of_different_lengths() -> None:
    a, b, c = make(3, 4)
    first, nothing, last, none = aggregate_columns([[a, None, b, c], [None], [c], []], AggregationMethod.TREE)
    assert nothing is None
    assert none is None
    assert first is not None
    assert_same(first, (a + b) + c)
    assert last is not None
    assert_same(last, c)
    assert last is not c
    assert aggregate_columns([]) == []
    with pytest.raises(InvalidArgumentError, match=r"tensor 1 of the list: contribution 2 has shape \(3,\)"):
        aggregate_columns([[a], [b, None, torch.ones(3)]])


def test_explain_says_choice_and_bytes() -> None:
    text = explain(8, 64 << 20, torch.float32, backend="torch")
    assert text.startswith("ADD_N in torch on cpu, as all contributions are at hand")
    assert f"(N+1)*S = {9 * (64 << 20)} bytes" in text
    assert f"3(N-1)*S = {21 * (64 << 20)}" in text
    assert "accumulated in torch.float32" in explain(2, 3 << 20, torch.bfloat16, AggregationMethod.TREE)
    assert explain(2, 8, torch.float32, AggregationMethod.TREE).startswith(
        "EXPERIMENTAL_TREE in torch on cpu, as asked"
    )
    with pytest.raises(InvalidArgumentError, match="n=0"):
        explain(0, 8, torch.float32)


def test_default_follows_the_cost_model() -> None:
    def choice(**settings: object) -> str:
        return explain(16, 1 << 20, torch.float32, **settings).split(" in ")[0]  # type: ignore[arg-type]

    assert choice() == "ADD_N"
    assert choice(at_hand=False) == "ADD_N"
    assert choice(at_hand=False, memory_allowance=32 << 20) == "ADD_N"
    assert choice(at_hand=False, memory_allowance=4 << 20) == "EXPERIMENTAL_TREE"
    # A plain 0 is ADD_N, not DEFAULT.
    assert choice(at_hand=False, memory_allowance=4 << 20, method=AggregationMethod.ADD_N) == "ADD_N"


def test_debug_log_explains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=get_logger().name):
        aggregate(make(3, 4), AggregationMethod.TREE)
    assert "EXPERIMENTAL_TREE" in caplog.text
    assert "N = 3" in caplog.text
