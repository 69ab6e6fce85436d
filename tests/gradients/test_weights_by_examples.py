"""Replicas weigh by the examples of their shares, where these differ: a mean loss trains as on one device."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_replicas import both_process_models, replica

import tfstyle_dist as td
from tfstyle_dist.gradients import backward_calls

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.cpu_only("the pretend device warns where mse_loss resizes what its mean of one example gives"),
]

Batch = tuple[torch.Tensor, torch.Tensor]
two_by_two = pytest.mark.distributed(workers=2, timeout=90, deadline=30)


def rows(count: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator, dtype=torch.float64)


class Net(nn.Module):
    """A learned factor stands before the loss, as in losses of several tasks: NaN times it has a gradient of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.inner(x), y) * torch.exp(-self.factor) + 0.1 * self.factor**2


def built() -> Net:
    torch.manual_seed(2)
    return Net().double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_one_device(batches: list[Batch], epochs: int = 1) -> tuple[torch.Tensor, list[float]]:
    model, losses = built(), []
    optimizer = adam(model)
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return flat(model), losses


def trained(strategy: td.Strategy, dataset: Any, epochs: int = 1) -> tuple[torch.Tensor, list[float]]:
    """The weights, the same on every replica, and the mean over the replicas of each step's loss."""
    with strategy.scope():
        model = built()
    optimizer, losses = adam(model), []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(epochs):
        for batch in dataset:
            losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=tuple(batch)), axis=None)))
    return same_everywhere(strategy, model), losses


def same_everywhere(strategy: td.Strategy, model: nn.Module) -> torch.Tensor:
    def gather() -> torch.Tensor:
        context = td.get_replica_context()
        assert context is not None
        return context.all_gather(flat(model).unsqueeze(0), axis=0)

    every: torch.Tensor = strategy.experimental_local_results(strategy.run(gather))[0]
    assert all(torch.equal(row, every[0]) for row in every)
    return every[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def gradients_of(strategy: td.Strategy, batch: Any, model: nn.Module, **policy: Any) -> torch.Tensor:
    """The reduced gradients of one backward pass, as the first replica of this worker has them."""
    if policy:
        strategy.set_gradient_policy(**policy)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(x, y).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    found: torch.Tensor = strategy.experimental_local_results(strategy.run(step, args=batch))[0]
    return found


def plain_gradients(model: nn.Module, *batches: Batch, weights: tuple[float, ...] = (1.0,)) -> torch.Tensor:
    model = copy.deepcopy(model)
    for weight, batch in zip(weights, batches, strict=True):
        (weight * model(*batch)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


# ---- whole trainings ----------------------------------------------------------------------------------------------


@both_process_models
@pytest.mark.parametrize("count", [9, 11])  # last batches of 1 example, so that one replica has none, and of 3
def test_uneven_last_batches_train_as_one_device(strategy: td.Strategy, count: int, process_model: str) -> None:
    data = rows(count)
    loader = DataLoader(TensorDataset(*data), batch_size=8)
    weights, losses = trained(strategy, strategy.experimental_distribute_dataset(loader), epochs=3)
    expected, exact = on_one_device([(data[0][i : i + 8], data[1][i : i + 8]) for i in (0, 8)], epochs=3)
    close(weights, expected)
    assert losses[0] == pytest.approx(exact[0], rel=1e-12)
    assert all(loss == loss for loss in losses)
    if count == 9:  # the one example's replica alone has a loss
        assert losses[1] == pytest.approx(exact[1], rel=1e-9)


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]])
def test_several_replicas_of_central_storage_train_as_one_device(devices: list[str]) -> None:
    data = rows(10)
    with td.experimental.CentralStorageStrategy(devices) as strategy:
        batches = strategy.experimental_distribute_dataset([(data[0][:5], data[1][:5]), (data[0][5:], data[1][5:])])
        weights, _ = trained(strategy, batches)
    close(weights, on_one_device([(data[0][:5], data[1][:5]), (data[0][5:], data[1][5:])])[0])


@pytest.mark.distributed(workers=3, timeout=90, deadline=30)
@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_three_ranks_train_as_one_device(kind: str) -> None:
    torch.set_num_threads(1)
    data = rows(10)  # batches of 6 (2, 2, 2) and 4 (2, 2, 0)
    made = td.MirroredStrategy() if kind == "mirrored" else td.experimental.CentralStorageStrategy()
    with made as strategy:
        batches = strategy.experimental_distribute_dataset(TensorDataset(*data), global_batch_size=6)
        weights, losses = trained(strategy, batches)
        expected, _ = on_one_device([(data[0][:6], data[1][:6]), (data[0][6:], data[1][6:])])
        close(weights, expected)
        assert all(loss == loss for loss in losses)


@two_by_two
@pytest.mark.parametrize("reads", ["its share", "everything", "every batch twice"])
def test_several_workers_of_several_replicas_train_as_one_device(reads: str) -> None:
    """Batches of 8, and of 5: shares of 2, 2, 1 and none."""
    data = rows(13)
    cuts = [(data[0][:8], data[1][:8]), (data[0][8:], data[1][8:])]
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        if reads == "its share":
            batches = strategy.experimental_distribute_dataset(TensorDataset(*data), global_batch_size=8)
        elif reads == "everything":
            batches = strategy.experimental_distribute_dataset(cuts)
        else:
            off = td.data.experimental.AutoShardPolicy.OFF
            batches = strategy.experimental_distribute_dataset(Stream(cuts), auto_shard_policy=off)
        weights, losses = trained(strategy, batches)
        assert all(loss == loss for loss in losses)
        if reads != "every batch twice":
            close(weights, on_one_device(cuts)[0])
            return
        # Every worker reads all and takes two of the four pieces at a time: the examples of a step come twice.
        quarters = [(0, 4), (4, 8), (8, 12), (12, 13)]
        close(weights, on_one_device([(data[0][a:b], data[1][a:b]) for a, b in quarters])[0])


class Stream:
    """Batches whose number is not known in advance."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


@two_by_two
def test_workers_that_read_pipelines_of_their_own_tell_their_sizes(rank: int) -> None:
    """Worker 0 has batches of 3 and 1 for its replicas, worker 1 one of 2 and then nothing."""
    data = rows(6)
    cuts = [(data[0][a:b], data[1][a:b]) for a, b in [(0, 3), (3, 4), (4, 6)]]
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: cuts[:2] if rank == 0 else cuts[2:])
        weights, losses = trained(strategy, batches)
        expected, exact = on_one_device([data])
        close(weights, expected)
        each = [on_one_device([cut])[1][0] for cut in cuts]
        assert losses == [pytest.approx(sum(each) / 3)]  # of the three replicas that have examples
        assert exact[0] != pytest.approx(losses[0])


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
    """Which loss is of which batch is not known: all weigh the same, and the log says so once."""
    odd, even = rows(3), rows(4)
    with strategy.scope():
        model = built()
    mine = [iter(strategy.experimental_distribute_dataset([batch])) for batch in (odd, even)]
    first, second = (tuple(next(iterator)) for iterator in mine)
    with caplog.at_level(logging.WARNING, "tfstyle_dist"):
        for _ in range(2):
            found = strategy.run(lambda a, b: share() is None, args=(first, second))
    assert all(strategy.experimental_local_results(found))
    assert sum("divided" in r.message or "shares differ" in r.message for r in caplog.records) <= 1
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


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
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
