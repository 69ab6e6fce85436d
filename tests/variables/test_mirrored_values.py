"""What ``reduce_to`` puts where a variable is, is used as one tensor, as in TensorFlow; a ``PerReplica`` is not."""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as td

TENSOR = torch.tensor([5.0, 2.0])


def made() -> tuple[Any, Any, Any]:
    """A strategy of two replicas, a value of each, and their sum where a variable is."""
    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = td.Variable([1.0, 1.0], aggregation=td.VariableAggregation.SUM)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: torch.tensor([2.0 + context.replica_id_in_sync_group, 1.0])
    )
    return strategy, own, strategy.extended.reduce_to("SUM", own, destinations=variable)


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("name", BINARY)
def test_operators_of_two(name: str) -> None:
    _, _, mirrored = made()
    apply, other = getattr(operator, name), torch.tensor([3.0, 4.0])
    assert torch.equal(apply(mirrored, other), apply(TENSOR, other))
    assert torch.equal(apply(other, mirrored), apply(other, TENSOR))
    assert torch.equal(apply(mirrored, mirrored), apply(TENSOR, TENSOR))
    if name != "matmul":
        assert torch.equal(apply(mirrored, 3), apply(TENSOR, 3))
        assert torch.equal(apply(3, mirrored), apply(3, TENSOR))


@pytest.mark.parametrize("name", ["and_", "or_", "xor", "lshift", "rshift", "invert"])
def test_operators_of_whole_numbers(name: str) -> None:
    mirrored = type(made()[2])((torch.tensor([6, 3]), torch.tensor([6, 3])))
    apply, others = getattr(operator, name), () if name == "invert" else (2,)
    assert torch.equal(apply(mirrored, *others), apply(torch.tensor([6, 3]), *others))


def test_what_a_tensor_has() -> None:
    strategy, _, mirrored = made()
    assert mirrored.shape == (2,)
    assert mirrored.dtype is torch.float32
    assert mirrored.tolist() == mirrored.cpu().numpy().tolist() == [5.0, 2.0]
    assert (-mirrored).tolist() == [-5.0, -2.0]
    assert torch.equal(abs(-mirrored), TENSOR)
    assert torch.equal(torch.cat([mirrored, TENSOR]), torch.cat([TENSOR, TENSOR]))
    assert torch.nn.functional.mse_loss(mirrored, TENSOR) == 0
    assert mirrored[0] == 5.0
    one = strategy.extended.reduce_to("MEAN", torch.tensor(2.5), destinations=mirrored)
    assert (float(one), int(one), complex(one), bool(one), one.item(), f"{one:.2f}") == (2.5, 2, 2.5, True, 2.5, "2.50")
    with pytest.raises(AttributeError, match=r"Mirrored.add_ would change the value of one replica alone"):
        mirrored.add_(1)
    assert (len(mirrored), np.asarray(mirrored.cpu()).dtype) == (2, np.float32)
    if mirrored.device.type == "cpu":
        assert np.asarray(mirrored).tolist() == [5.0, 2.0]
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        mirrored.missing  # noqa: B018
    assert torch.equal(copy.deepcopy(mirrored) + 0, TENSOR)


def test_a_replica_uses_its_own() -> None:
    strategy, _, mirrored = made()
    given = strategy.run(lambda: mirrored + td.get_replica_context().replica_id_in_sync_group)
    assert [value.tolist() for value in given.values] == [[5.0, 2.0], [6.0, 3.0]]
    seen = strategy.run(lambda: (mirrored.data_ptr(),))
    assert seen[0].values == tuple(value.data_ptr() for value in mirrored.values)
    with strategy.scope():
        variable = td.Variable([1.0, 1.0], aggregation=td.VariableAggregation.MEAN)
    assert (variable + mirrored).tolist() == [6.0, 3.0]
    variable.assign(mirrored)
    assert variable.tolist() == [5.0, 2.0]


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v + 1,
        lambda v: v // 2,
        lambda v: 2.0**v,
        lambda v: v % 2,
        lambda v: v @ v,
        abs,
        operator.invert,
        lambda v: v[0],
        complex,
    ],
)
def test_values_that_may_differ_are_no_tensor(use: Any) -> None:
    _, own, _ = made()
    with pytest.raises(TypeError, match=r"it holds one value for each of 2 local replicas.*experimental_local_results"):
        use(own)


def test_what_each_of_them_has_is_said() -> None:
    _, own, _ = made()
    with pytest.raises(AttributeError, match=r"no attribute 'shape': .*_local_results\(value\)\[0\]\.shape"):
        own.shape  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'missing'$"):
        own.missing  # noqa: B018
    assert not hasattr(own, "__array__")
