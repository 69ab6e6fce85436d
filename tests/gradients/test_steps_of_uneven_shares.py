"""What else a step does whose shares differ in size: accumulation, policies, variables, empty shares."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn
from two_replicas import both_process_models
from uneven_shares import built, close, flat, gradients_of, plain_gradients, rows

import tfstyle_dist as td
from tfstyle_dist.core import logging as said
from tfstyle_dist.core.logging import _said
from tfstyle_dist.gradients import backward_calls

pytestmark = pytest.mark.timeout(120)

# ---- what else a step does ----------------------------------------------------------------------------------------


@both_process_models
def test_what_accumulates_weighs_as_its_own_batch(strategy: td.Strategy, process_model: str) -> None:
    data = rows(7)
    cuts = [(data[0][a:b], data[1][a:b]) for a, b in [(0, 3), (3, 4), (4, 7)]]  # shares 2 and 1, 1 and 0, 2 and 1
    with strategy.scope():
        model = built()

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        model(x, y).backward()

    first, second, third = [tuple(batch) for batch in strategy.experimental_distribute_dataset(cuts)]
    with strategy.accumulate():
        strategy.run(add, args=first)
        strategy.run(add, args=second)
    strategy.run(add, args=third)
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    close(found, plain_gradients(model, *cuts, weights=(1.0, 1.0, 1.0)))


@both_process_models
@pytest.mark.parametrize("size", [3, 1])
def test_a_policy_asks_for_equal_weights_or_sums(strategy: td.Strategy, size: int, process_model: str) -> None:
    data = rows(size)
    cut = (size + 1) // 2
    parts = [(data[0][:cut], data[1][:cut]), (data[0][cut:], data[1][cut:])][: 2 if size > 1 else 1]
    with strategy.scope():
        model = built()
    (batch,) = [tuple(batch) for batch in strategy.experimental_distribute_dataset([data])]
    close(gradients_of(strategy, batch, model), plain_gradients(model, data))
    equal = sum(plain_gradients(model, part) for part in parts)
    close(gradients_of(strategy, batch, model, scale="SUM"), equal + (0 if size > 1 else of_nothing(model)))
    close(gradients_of(strategy, batch, model, scale="MEAN"), (equal + (0 if size > 1 else of_nothing(model))) / 2)


def of_nothing(model: nn.Module) -> torch.Tensor:
    """The gradients of a loss over no examples, NaN counting as 0: here of its second term."""
    empty = rows(1)
    return plain_gradients(model, (empty[0][:0], empty[1][:0])).nan_to_num(0.0)


@both_process_models
def test_equal_shares_touch_nothing(strategy: td.Strategy, process_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(4)
    with strategy.scope():
        model = built()
    (batch,) = [tuple(batch) for batch in strategy.experimental_distribute_dataset([data])]

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("equal shares must not be weighed")

    monkeypatch.setattr(backward_calls, "weighed_by_examples", refused)
    close(gradients_of(strategy, batch, model), plain_gradients(model, data))
    shares = strategy.experimental_local_results(strategy.run(lambda _: share() is None, args=(batch,)))
    assert all(shares)


def share() -> Any:
    context = td.get_replica_context()
    assert context is not None
    return context.share


@both_process_models
def test_batches_that_were_divided_differently_do_not_mix(
    strategy: td.Strategy, process_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which loss is of which batch is not known: all weigh the same, and each process says so once."""
    _said.discard("shares of several batches")
    odd, even = rows(3), rows(4)
    with strategy.scope():
        model = built()
    mine = [iter(strategy.experimental_distribute_dataset([batch])) for batch in (odd, even)]
    first, second = (tuple(next(iterator)) for iterator in mine)
    with caplog.at_level(logging.WARNING, "tfstyle_dist"):
        for _ in range(2):
            found = strategy.run(lambda a, b: share() is None, args=(first, second))
    assert all(strategy.experimental_local_results(found))
    assert caplog.text.count("was given batches that are divided in different ways") == 1
    assert not any(strategy.experimental_local_results(strategy.run(lambda a, b: share() is None, args=(first, first))))
    close(gradients_of(strategy, first, model), plain_gradients(model, odd))
    close(gradients_of(strategy, second, model), plain_gradients(model, even))


@both_process_models
def test_one_pass_reaches_parameters_of_two_kinds(strategy: td.Strategy, process_model: str) -> None:
    """Each by its policy; a pass that reaches one kind alone is weighed by that kind."""
    data = rows(3)
    with strategy.scope():
        model = built()
    strategy.set_gradient_policy([model.factor], scale="SUM")
    (batch,) = [tuple(batch) for batch in strategy.experimental_distribute_dataset([data])]
    found = gradients_of(strategy, batch, model)
    parts = [(data[0][:2], data[1][:2]), (data[0][2:], data[1][2:])]
    expected = plain_gradients(model, data)
    expected[0] = sum(plain_gradients(model, part)[0] for part in parts)  # the module's own parameter comes first
    close(found, expected)


@both_process_models
def test_a_pass_of_summed_parameters_is_left_alone_beside_others(strategy: td.Strategy, process_model: str) -> None:
    """What a replica without examples adds to a sum, such as a penalty of the weights, stays."""
    data = rows(1)
    with strategy.scope():
        summed, weighed = built(), built()
    strategy.set_gradient_policy(summed.parameters(), scale="SUM")
    (batch,) = [tuple(batch) for batch in strategy.experimental_distribute_dataset([data])]
    with torch.no_grad():
        summed.factor.fill_(0.5)
    close(gradients_of(strategy, batch, summed), plain_gradients(summed, data) + of_nothing(summed))
    close(gradients_of(strategy, batch, weighed), plain_gradients(weighed, data))


@both_process_models
def test_tf_style_optimizers_sum_as_before(strategy: td.Strategy, process_model: str) -> None:
    data = rows(3)
    with strategy.scope():
        model = built()
    start = flat(model)
    styled = td.train.GradientDescentOptimizer(1.0)
    (batch,) = [tuple(batch) for batch in strategy.experimental_distribute_dataset([data])]
    strategy.run(lambda x, y: styled.minimize(model(x, y), var_list=list(model.parameters())), args=batch)
    parts = [(data[0][:2], data[1][:2]), (data[0][2:], data[1][2:])]
    close(start - flat(model), sum(plain_gradients(built(), part) for part in parts))


@pytest.mark.filterwarnings("ignore:Using backward")
@both_process_models
def test_the_reduced_gradients_keep_their_graph(strategy: td.Strategy, process_model: str) -> None:
    data = rows(3)
    with strategy.scope():
        model = built()
    (batch,) = [tuple(batch) for batch in strategy.experimental_distribute_dataset([data])]

    def penalty(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        net(x, y).backward(create_graph=True)
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        for parameter in net.parameters():
            parameter.grad = None
        return torch.stack([g.square().sum() for g in grads]).sum()

    other = copy.deepcopy(model)
    expected = penalty(other, *data)
    found = strategy.run(lambda x, y: penalty(model, x, y).detach(), args=batch)
    for value in strategy.experimental_local_results(found):
        close(value, expected.detach())


@both_process_models
def test_sparse_gradients_weigh_too(strategy: td.Strategy, process_model: str) -> None:
    torch.manual_seed(0)
    with strategy.scope():
        table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    (batch,) = strategy.experimental_distribute_dataset([torch.tensor([0, 1, 1])])

    def step(rows: torch.Tensor) -> torch.Tensor:
        table(rows).square().mean().backward()
        assert table.weight.grad is not None
        return table.weight.grad.to_dense()

    expected = torch.zeros(5, 2, dtype=torch.float64)
    weights = table.weight.detach()
    for row in (0, 1, 1):
        expected[row] += 2 * weights[row] / 6
    for found in strategy.experimental_local_results(strategy.run(step, args=(batch,))):
        close(found, expected)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said, "_said", set())  # a store of before may have had the same id
    data = rows(3)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = built()
        batches = strategy.experimental_distribute_dataset([data])
        with caplog.at_level(logging.WARNING, "tfstyle_dist"):
            for _ in range(3):
                for batch in batches:
                    gradients_of(strategy, tuple(batch), model)
    (record,) = [r for r in caplog.records if "divided unevenly over 2 replicas" in r.message]
    assert "3 examples" in record.message
    assert "set_gradient_policy(scale='MEAN')" in record.message


def test_replicas_without_examples_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Their own loss is NaN: the log says where to read it."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = built()
        batches = strategy.experimental_distribute_dataset([rows(1)])
        with caplog.at_level(logging.WARNING, "tfstyle_dist"):
            for _ in range(2):
                for batch in batches:
                    gradients_of(strategy, tuple(batch), model)
    (record,) = [r for r in caplog.records if "have no example of a batch" in r.message]
    assert "1 of 2 replicas have no example of a batch of 1" in record.message
    assert "strategy.reduce" in record.message


# ---- an empty share -----------------------------------------------------------------------------------------------


def of_one_example(strategy: td.Strategy) -> torch.Tensor:
    """A global batch of one example: replica 1 has none."""
    (batch,) = strategy.experimental_distribute_dataset([torch.tensor([[3.0, 5.0]])])
    return batch  # type: ignore[no-any-return]


@both_process_models
def test_an_empty_share_counts_in_no_mean(strategy: td.Strategy, process_model: str) -> None:
    batch = of_one_example(strategy)
    means = strategy.run(lambda x: {"loss": x.mean(), "seen": x.new_tensor(float(len(x)))}, args=(batch,))
    assert float(strategy.reduce("MEAN", means["loss"], axis=None)) == 4.0
    assert float(strategy.reduce("SUM", means["loss"], axis=None)) == 4.0
    assert float(strategy.reduce("MEAN", means["seen"], axis=None)) == 0.5  # a value like any other: as in TensorFlow
    assert float(strategy.reduce("SUM", means["seen"], axis=None)) == 1.0

    def inside(x: torch.Tensor) -> list[torch.Tensor]:
        context = td.get_replica_context()
        assert context is not None
        leaf = x.mean().requires_grad_()
        total = context.all_reduce("MEAN", leaf)
        total.backward()
        assert leaf.grad is not None
        return [total.detach(), context.all_reduce("SUM", x.mean()), leaf.grad]

    found = [strategy.experimental_local_results(part) for part in strategy.run(inside, args=(batch,))]
    assert all(float(value) == 4.0 for value in (*found[0], *found[1]))
    assert float(strategy.reduce("SUM", strategy.run(lambda x: inside(x)[2], args=(batch,)), axis=None)) == 2.0


@both_process_models
def test_an_empty_share_counts_in_no_mean_of_merge_call(strategy: td.Strategy, process_model: str) -> None:
    def merge(strategy: td.Strategy, loss: Any) -> list[torch.Tensor]:
        total = strategy.extended.reduce_to("SUM", loss, "cpu:0")
        (mean,) = strategy.extended.batch_reduce_to("MEAN", [(loss, "cpu:0")])
        return [strategy.reduce("MEAN", loss, axis=None), total, mean]

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        context = td.get_replica_context()
        assert context is not None
        found: list[torch.Tensor] = context.merge_call(merge, args=(x.mean(),))
        return found

    for part in strategy.run(step, args=(of_one_example(strategy),)):
        assert {float(value) for value in strategy.experimental_local_results(part)} == {4.0}


@both_process_models
def test_nan_of_examples_stays(strategy: td.Strategy, process_model: str) -> None:
    batch = of_one_example(strategy)
    bad = strategy.run(lambda x: x.mean() * float("nan"), args=(batch,))
    assert torch.isnan(strategy.reduce("MEAN", bad, axis=None))
    everywhere = strategy.run(lambda: torch.tensor(float("nan")))
    assert torch.isnan(strategy.reduce("SUM", everywhere, axis=None))


@both_process_models
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("synchronization", ["ON_READ", "ON_WRITE"])
def test_variables_take_nothing_of_an_empty_share(
    strategy: td.Strategy, aggregation: str, synchronization: str, process_model: str
) -> None:
    with strategy.scope():
        total = td.Variable(
            0.0,
            trainable=False,
            synchronization=getattr(td.VariableSynchronization, synchronization),
            aggregation=getattr(td.VariableAggregation, aggregation),
        )
    strategy.run(lambda x: [total.assign_add(x.mean()), None][1], args=(of_one_example(strategy),))
    shared_over_both = (aggregation, synchronization) == ("MEAN", "ON_READ")  # the mean of the copies, 4 and 0
    assert float(total) == (2.0 if shared_over_both else 4.0)


@both_process_models
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_no_empty_batch(strategy: td.Strategy, momentum: float | None, process_model: str) -> None:
    with strategy.scope():
        norm = nn.BatchNorm2d(2, momentum=momentum)
    data = torch.randn(1, 2, 3, 3)
    (batch,) = strategy.experimental_distribute_dataset([data])

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        norm(x)
        assert norm.num_batches_tracked is not None
        assert norm.running_mean is not None
        return [norm.num_batches_tracked.clone(), norm.running_mean.clone()]

    strategy.run(step, args=(batch,))
    counts, means = (
        strategy.experimental_local_results(part)
        for part in strategy.run(lambda: [norm.num_batches_tracked.clone(), norm.running_mean.clone()])
    )
    plain = nn.BatchNorm2d(2, momentum=momentum)
    plain(data)
    first = strategy.run(replica)
    for number, count, mean in zip(strategy.experimental_local_results(first), counts, means, strict=True):
        assert int(count) == (1 if number == 0 else 0)
        torch.testing.assert_close(mean, plain.running_mean if number == 0 else torch.zeros(2))
