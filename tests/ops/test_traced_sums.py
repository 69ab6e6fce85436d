"""``aggregate`` under ``torch.compile``, and its operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sum_oracles import add_n_oracle, assert_same, make, tree_oracle
from torch import Tensor, library

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.ops import aggregate, aggregate_list

pytestmark = pytest.mark.timeout(180)


def whole(function: Callable[..., object]) -> Callable[..., object]:
    """Compiles into one graph, or fails. The Python backend: what is tested is the tracing."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_sum_is_one_graph() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return aggregate([a * 2, None, b, c], AggregationMethod.TREE, divisor=3).relu() + 1

    xs = make(3, 50)
    assert_same(whole(step)(*xs), (tree_oracle([xs[0] * 2, *xs[1:]]) / 3).relu() + 1)


def test_out_is_written() -> None:
    def step(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        aggregate([a, b, out], out=out)
        return out * 2

    a, b, out = make(3, 50)
    expected = add_n_oracle([a, b, out])
    assert_same(whole(step)(a, b, out), expected * 2)
    assert_same(out, expected)


def test_lists() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        return [t + 1 for t in aggregate_list([[a, b], [b, None], [a, a]])]

    a, b = make(2, 50)
    compiled = whole(step)
    for result, parts in zip(compiled(a, b), ([a, b, a], [b, a]), strict=True):  # type: ignore[call-overload]
        assert_same(result, add_n_oracle(parts) + 1)


def test_no_gradient_is_recorded() -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return (aggregate([a, b]) * a).sum()

    a, b = (t.requires_grad_() for t in make(2, 50))
    whole(loss)(a, b).backward()  # type: ignore[attr-defined]
    assert_same(a.grad, (a + b).detach())
    assert b.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_registered_correctly(dtype: torch.dtype) -> None:
    xs = make(3, (5, 4), dtype)
    operators = torch.ops.tfstyle_dist
    library.opcheck(operators.aggregate.default, (xs, "tree", None, "torch"))
    library.opcheck(operators.aggregate.default, ([t.T for t in xs], "add_n", 2.0, "llvm"))
    library.opcheck(operators.aggregate_into.default, (xs, torch.empty(5, 4, dtype=dtype), "add_n", 3.0, "torch"))
    library.opcheck(operators.aggregate_list.default, (xs + xs, 3, "accumulate_n", 3.0, "auto"))


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
@pytest.mark.parametrize("name", ["aggregate", "aggregate_into", "aggregate_list"])
def test_cuda_graphs_leave_the_operators_out(name: str) -> None:
    """``mode="reduce-overhead"`` would replay them over addresses that hold something else by then."""
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.tfstyle_dist, name).default.tags
