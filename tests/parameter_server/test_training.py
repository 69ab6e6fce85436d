"""Modules and optimizers under a parameter server, in real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05),
    "groups": lambda m: torch.optim.Adam([{"params": m[0].parameters(), "lr": 0.01}, {"params": m[2].parameters()}]),
}


def plain_training(make: Callable[[Any], torch.optim.Optimizer], steps: int, decay: float) -> torch.nn.Module:
    net = model()
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return net


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_function_at_a_time_equals_plain_training(cluster: Any, kind: str, shards: int | None) -> None:
    c = cluster(workers=2, ps=2, partitioner=None if shards is None else FixedShardsPartitioner(shards))
    strategy = c.strategy
    with strategy.scope():
        net = model()
    optimizer = OPTIMIZERS[kind](net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def replica(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            return loss

        return strategy.run(replica, args=(x, y))

    for number in range(6):
        c.coordinator.schedule(step, args=batch(number))
        c.coordinator.join(timeout=30)
        scheduler.step()
    expected = plain_training(OPTIMIZERS[kind], 6, 0.9)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-6)
    state = net.state_dict()
    torch.testing.assert_close(dict(state), dict(expected.state_dict()), rtol=1e-6, atol=1e-6)


def test_two_workers_train_asynchronously(cluster: Any) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        net = model()
        steps = td.Variable(0, dtype=torch.int64, name="steps")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def step(seed: int) -> tuple[int, torch.Tensor]:
        x, y = batch(seed)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        steps.assign_add(1)
        return td.coordinator.experimental_get_current_worker_index(), loss

    def loss_here() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.mse_loss(net(batch(1000)[0]), batch(1000)[1]))

    before = loss_here()
    c.await_workers()
    results = [c.coordinator.schedule(step, args=(seed,)) for seed in range(200)]
    c.coordinator.join(timeout=60)
    fetched = c.coordinator.fetch(results)
    assert {worker for worker, _ in fetched} == {0, 1}
    assert int(steps) == 200
    assert loss_here() < before / 10


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_tf_style_optimizers_keep_their_slots_on_the_servers(cluster: Any, kind: str) -> None:
    def make() -> td.train.TFOptimizer:
        if kind == "sgd":
            return td.train.MomentumOptimizer(0.1, 0.9)
        return td.train.AdamOptimizer(0.1)

    c = cluster(workers=1, ps=2)
    with c.strategy.scope():
        w, b = td.Variable([[1.0], [2.0]], name="w"), td.Variable([0.5], name="b")
    optimizer = make()

    def step(x: torch.Tensor) -> None:
        optimizer.minimize(lambda: ((x @ w + b) ** 2).mean(), var_list=[w, b])

    data = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    for _ in range(5):
        c.coordinator.schedule(step, args=(data,))
        c.coordinator.join(timeout=30)
    plain_w, plain_b = td.Variable([[1.0], [2.0]]), td.Variable([0.5])
    other = make()
    for _ in range(5):
        other.minimize(lambda: ((data @ plain_w + plain_b) ** 2).mean(), var_list=[plain_w, plain_b])
    torch.testing.assert_close(w.value(), plain_w.value())
    torch.testing.assert_close(b.value(), plain_b.value())


def test_buffers_collect_what_the_workers_change(cluster: Any) -> None:
    c = cluster(workers=2, ps=2)
    with c.strategy.scope():
        norm = torch.nn.BatchNorm1d(4)
    x = torch.randn(32, 4) + 3.0
    for _ in range(6):
        c.coordinator.schedule(lambda x: norm(x).detach().sum(), args=(x,))
        c.coordinator.join(timeout=30)
    plain = torch.nn.BatchNorm1d(4)
    for _ in range(6):
        plain(x)
    assert int(norm.num_batches_tracked) == 6
    torch.testing.assert_close(norm.running_mean * 1, plain.running_mean)
    torch.testing.assert_close(norm.running_var * 1, plain.running_var)


def test_loading_a_state_dict_changes_the_servers(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = model()
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    net.load_state_dict(other.state_dict())
    x = torch.ones(2, 4)
    found = c.coordinator.schedule(lambda: net(x)).get()
    torch.testing.assert_close(found, other(x).detach())


def test_a_parameter_of_the_scope_becomes_no_other_one(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(4, 3)
        for made in (lambda: torch.nn.Parameter(net.weight), lambda: torch.nn.utils.parametrizations.weight_norm(net)):
            with pytest.raises(TypeError, match=r"torch.nn.Parameter was called with 'weight', which lives on"):
                made()
        other = torch.nn.Linear(4, 3)
        other.weight = torch.nn.Parameter(net.weight.detach().clone())
    torch.testing.assert_close(other.weight.detach(), net.weight.detach())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_the_memory_of_a_parameter_of_the_scope_becomes_no_other_one(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        one, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        for made in (lambda: torch.nn.Parameter(one.weight.data), lambda: torch.nn.utils.weight_norm(other)):
            with pytest.raises(TypeError, match=r"with the memory of 'weight'.*strategy.experimental_adopt\(module\)"):
                made()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_module_with_weight_norm_that_was_built_before_the_scope_learns(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    torch.manual_seed(0)
    net = torch.nn.utils.weight_norm(torch.nn.Linear(4, 3))
    expected = torch.nn.utils.weight_norm(torch.nn.Linear(4, 3))
    expected.load_state_dict(net.state_dict())
    c.strategy.experimental_adopt(net)
    x = torch.ones(2, 4)
    for each in (net, expected):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

        def step(each: Any = each, optimizer: Any = optimizer) -> None:
            each(x).square().mean().backward()
            optimizer.step()

        if each is net:
            c.coordinator.schedule(step).get()
        else:
            step()
    for mine, wanted in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach())
