"""Tensors in the memory of a variable: what a program may do with them, and that writes reach every copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch

import tfstyle_dist as tfd


@pytest.fixture
def strategy() -> Iterator[tfd.Strategy]:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


@pytest.fixture
def variable(strategy: tfd.Strategy) -> tfd.Variable:
    with strategy.scope():
        return tfd.Variable(torch.ones(2, 2))


def _copies(strategy: tfd.Strategy, variable: tfd.Variable) -> list[float]:
    return [float(part.detach().sum()) for part in strategy.experimental_local_results(variable)]


def test_writes_beside_other_variables_and_aliases(strategy: tfd.Strategy, variable: tfd.Variable) -> None:
    with strategy.scope():
        other = tfd.Variable(torch.full((2, 2), 3.0))
    data = variable.data
    with torch.no_grad():
        data.add_(other)
    assert _copies(strategy, variable) == [16.0, 16.0]
    data.copy_(other.data * 2)
    assert _copies(strategy, variable) == [24.0, 24.0]
    torch.add(data, data, out=data)
    assert _copies(strategy, variable) == [48.0, 48.0]
    with torch.no_grad():
        for row in variable:
            row.fill_(1.0)
    assert _copies(strategy, variable) == [4.0, 4.0]
    strategy.run(lambda: variable.data.mul_(2.0))
    assert _copies(strategy, variable) == [8.0, 8.0]
    assert data.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_new_values_are_no_aliases(strategy: tfd.Strategy, variable: tfd.Variable) -> None:
    data = variable.detach()
    made = [data * 2, data.clone(), data + variable, torch.stack([data, data]), copy.deepcopy(data)]
    made.append(pickle.loads(pickle.dumps(data)))
    assert all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in made)
    for value in made:
        value.detach().zero_()
    assert _copies(strategy, variable) == [4.0, 4.0]


def test_what_only_looks(variable: tfd.Variable) -> None:
    data = variable.detach()
    assert f"{data[0, 0]:.1f} {data[0, 0].item()} {len(data)} {bool((data == 1).all())}" == "1.0 1.0 2 True"
    assert repr(data) == repr(torch.ones(2, 2))
    leaf = variable.detach()
    leaf.requires_grad_()
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 2), 3.0))
    assert variable.grad is None


@pytest.mark.cpu_only("arrays are on the host")
def test_arrays_are_read_only(variable: tfd.Variable) -> None:
    assert not variable.detach().numpy().flags.writeable
    assert variable.numpy().flags.writeable


def test_in_a_compiled_function(strategy: tfd.Strategy, variable: tfd.Variable) -> None:
    double = torch.compile(lambda tensor: tensor.mul_(2).sum(), backend="aot_eager")
    assert float(double(variable.detach())) == 8.0
    assert _copies(strategy, variable) == [8.0, 8.0]


def test_statistics_in_variables(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        mean, variance = (tfd.Variable(torch.zeros(3), trainable=False) for _ in range(2))
    torch.nn.functional.batch_norm(torch.arange(6.0).reshape(2, 3), mean, variance, training=True, momentum=1.0)
    for part in strategy.experimental_local_results(mean):
        assert part.detach().tolist() == [1.5, 2.5, 3.5]
    torch.nn.init.constant_(variance, 2.0)
    for part in strategy.experimental_local_results(variance):
        assert part.detach().tolist() == [2.0, 2.0, 2.0]


class _Holder:
    """An object of a program."""

    mean: torch.Tensor


def test_what_objects_keep_is_each_replicas_own_copy(strategy: tfd.Strategy, variable: tfd.Variable) -> None:
    holder, module = _Holder(), torch.nn.Identity()
    holder.mean = variable.detach()
    module.register_buffer("row", variable.data[1])

    def step() -> list[float]:
        replica = tfd.get_replica_context().replica_id_in_sync_group
        holder.mean.add_(1.0 + replica)
        module.row.mul_(2.0 + replica)
        return [*variable.detach().flatten().tolist(), *holder.mean[1].tolist(), *module.row.tolist()]

    first, second = strategy.experimental_local_results(strategy.run(step))
    assert first == [2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    assert second == [3.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert holder.mean.tolist() == [[2.0, 2.0], [4.0, 4.0]]


@pytest.mark.cpu_only("these suites wrap the call that torch.nn.Parameter makes")
def test_the_memory_of_a_variable_becomes_no_parameter() -> None:
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = tfd.Variable(torch.zeros(3))
    for view in (variable.data, variable.detach()):
        with pytest.raises(TypeError, match=r"Give it the values, torch.nn.Parameter\(p.detach\(\).clone\(\)\)"):
            torch.nn.Parameter(view)
    assert type(torch.nn.Parameter(variable.detach().clone())) is torch.nn.Parameter
