"""Optimizers that somebody else wrote, on parameter servers: counts in groups, settings of their own, empty steps."""

from __future__ import annotations

import collections
import copy
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tfstyle_dist as td
from tfstyle_dist.core import logging as our_logging
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner
from tfstyle_dist.parameter_server.server.optimizer_rules import (
    LocalParameters,
    TorchRule,
    optimizer_state,
    restore_optimizer,
)

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counting(torch.optim.Optimizer):
    """Counts in its groups and beside them, divides by a norm of all gradients, and fails where there is none."""

    scale = 0.5
    rule = torch.tanh

    def __init__(self, params: Any, lr: float, scale: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "step": 0, "grown": 1.0})
        self.scale, self.rule, self.norms = scale, F.hardtanh, list[torch.Tensor]()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(torch.stack([grad.square().sum() for grad in found]).sum().sqrt())
        for group in self.param_groups:
            group["step"] += 1
            group["grown"] = group["grown"] * 1.5
            for p in group["params"]:
                change = self.rule(p.grad / (self.scale + sum(self.norms))) * group["grown"]
                p.sub_(group["lr"] / group["step"] * change)


class Slow(torch.optim.SGD):
    """Keeps copies of the weights in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step()
        self.slow[0].zero_()


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.inner.step()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    return torch.nn.Sequential(torch.nn.Linear(4, 6, **wide), torch.nn.Tanh(), torch.nn.Linear(6, 1, **wide))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Job:
    """A model in training, on servers or in one process."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], cluster: Any = None) -> None:
        self.cluster = cluster
        if cluster is None:
            self.net = model()
        else:
            with cluster.strategy.scope():
                self.net = model()
        self.optimizer = make(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.checkpoint = td.train.Checkpoint(net=self.net, optimizer=self.optimizer)

    def train(self, seeds: range) -> None:
        """Some steps, after each of which the learning rate falls."""
        net, optimizer = self.net, self.optimizer

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()

        for seed in seeds:
            if self.cluster is None:
                step(batch(seed))
            else:
                self.cluster.coordinator.schedule(step, args=(batch(seed),))
                self.cluster.coordinator.join(timeout=30)
            self.scheduler.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])


def counting(parameters: Any) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1)


def test_a_rule_that_counts_in_its_groups_trains_as_on_one_device(cluster: Any) -> None:
    """A worker's empty step counts nothing, and a new learning rate does not take back what a server has counted."""
    here, there = Job(counting), Job(counting, cluster(workers=1, ps=1))
    for job in (here, there):
        job.train(range(5))
    torch.testing.assert_close(there.weights(), here.weights(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("to_servers", [True, False])
def test_what_a_rule_counts_in_its_groups_is_in_checkpoints(cluster: Any, tmp_path: Path, to_servers: bool) -> None:
    """Restored into the same servers, which have counted on, and into one process."""

    def plain(parameters: Any) -> torch.optim.Optimizer:
        made = counting(parameters)
        made.norms = [torch.ones((), dtype=torch.float64)]  # type: ignore[attr-defined]  # no state_dict has attributes
        return made

    c = cluster(workers=1, ps=1)
    first = Job(counting, c)
    first.train(range(3))
    saved = first.checkpoint.save(tmp_path / "ckpt")
    assert [group["step"] for group in first.optimizer.param_groups] == [0], "the coordinator makes no steps"
    second = first if to_servers else Job(plain)
    if to_servers:
        first.train(range(3, 5))
    second.checkpoint.restore(saved).assert_consumed()
    assert [group["step"] for group in second.optimizer.param_groups] == [3]
    again = second.checkpoint.save(tmp_path / "again")
    read = Job(plain)
    read.checkpoint.restore(again).assert_consumed()
    assert [(g["step"], g["grown"]) for g in read.optimizer.param_groups] == [(3, 1.5**3)]
    torch.testing.assert_close(read.weights(), second.weights(), rtol=0, atol=0)


def test_a_step_in_the_coordinators_program_counts_on_the_servers_alone(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)

    class Quiet(Counting):
        """Takes a step without gradients."""

        def step(self, closure: Callable[[], Any] | None = None) -> None:
            if all(p.grad is None for group in self.param_groups for p in group["params"]):
                self.param_groups[0]["step"] += 1
                return
            super().step()

    job, reference = (Job(lambda p: Quiet(p, lr=0.1), each) for each in (c, None))
    for each in (job, reference):
        for seed in range(3):
            each.optimizer.zero_grad()
            F.mse_loss(each.net(batch(seed)), batch(seed).sum(1, keepdim=True)).backward()
            each.optimizer.step()
            each.scheduler.step()
    assert job.optimizer.param_groups[0]["step"] == 0
    torch.testing.assert_close(job.weights(), reference.weights(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_unscaled_before_they_are_sent(cluster: Any, fused: bool) -> None:
    """A fused optimizer would do that itself in its step, which a worker does not make."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(2, 1, bias=False)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=1.0, fused=fused), net.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step() -> None:
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    c.coordinator.schedule(step)
    c.coordinator.join(timeout=30)
    torch.testing.assert_close(net.weight.detach(), before - 1)


def test_what_cannot_be_sent_is_named(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with pytest.raises(TypeError, match="Wrapper steps another optimizer, its attribute 'inner'"):
        Job(lambda p: Wrapper(torch.optim.SGD(p, lr=0.1)), c).train(range(1))
    odd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    odd.param_groups[0] = collections.OrderedDict(odd.param_groups[0])
    with pytest.raises(TypeError, match="groups of SGD are of the class OrderedDict; parameter servers take dicts"):
        optimizer_state(odd)
    with pytest.raises(TypeError, match=r"Slow\.step\(\) uses the attribute 'slow' of the optimizer"):
        Job(lambda p: Slow(p, lr=0.1), c).train(range(1))


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("hook", ["gradient", "accumulated", "before the step", "after the step", "before each step"])
def test_hooks_of_the_coordinators_program_are_refused(cluster: Any, hook: str, when: str) -> None:
    """They would not be called on a worker; in a function they are."""
    c = cluster(workers=1, ps=1)
    job = Job(lambda p: torch.optim.SGD(p, lr=0.1), c)
    parameter = job.net[0].weight
    if when == "between":
        job.train(range(1))
    register: Any = {
        "gradient": lambda: parameter.register_hook(lambda grad: 2 * grad),
        "accumulated": lambda: parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
        "before the step": lambda: job.optimizer.register_step_pre_hook(lambda *_: None),
        "after the step": lambda: job.optimizer.register_step_post_hook(lambda *_: None),
        "before each step": lambda: register_optimizer_step_pre_hook(lambda *_: None),
    }[hook]
    handle = register()
    with pytest.raises(
        TypeError, match="SGD has a hook" if "step" in hook else r"The parameter '0\.weight' has a hook"
    ):
        job.train(range(1))
    handle.remove()
    job.train(range(1))


def test_a_hook_of_a_parameter_of_no_optimizer_is_refused(cluster: Any) -> None:
    """It may step an optimizer of its own in the backward pass."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(2, 1)
    net.bias.register_post_accumulate_grad_hook(lambda p: None)

    def backward() -> None:
        net(torch.ones(1, 2)).sum().backward()

    with pytest.raises(TypeError, match="The parameter 'bias' has a hook"):
        c.coordinator.schedule(backward)


def test_hooks_of_a_function_are_called(cluster: Any) -> None:
    """Those of parameters; one before the step would come after the gradients were sent."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=1.0), net.weight.detach().clone()

    def step() -> None:
        handle = net.weight.register_hook(lambda grad: 3 * grad)
        net(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
        handle.remove()

    c.coordinator.schedule(step)
    c.coordinator.join(timeout=30)
    torch.testing.assert_close(net.weight.detach(), before - 3)

    def other() -> None:
        optimizer.register_step_pre_hook(lambda *_: None)
        net(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()

    c.coordinator.schedule(other)
    with pytest.raises(TypeError, match=r"step\(\) sends the gradients before such hooks"):
        c.coordinator.join(timeout=30)


def test_a_server_that_starts_again_has_the_attributes() -> None:
    """What a snapshot has of an optimizer; its parts are what the coordinator sent."""
    net = model()
    made = optimizer_state(counting(net.parameters()))

    def rule() -> TorchRule:
        kind, state = copy.deepcopy(made)
        for group in state["param_groups"]:
            group["params"] = [LocalParameters([p]) for p in group["params"]]
        return TorchRule(restore_optimizer(kind, state))

    first, second = rule(), rule()
    parameters = first._optimizer.param_groups[0]["params"]
    first.apply([(torch.ones_like(p), p) for p in parameters])
    settings = first.settings()
    first.apply([(torch.ones_like(p), p) for p in parameters])
    second.put_settings(settings)
    assert len(second._optimizer.norms) == 1  # type: ignore[attr-defined]
    assert second._optimizer.param_groups[0]["step"] == 1
    assert second._optimizer.scale == 0.25  # type: ignore[attr-defined]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged in a test, also what was said once before."""
    monkeypatch.setattr(our_logging, "_said", set())
    monkeypatch.setattr(our_logging.get_logger(), "propagate", True)
    with caplog.at_level(logging.WARNING):
        yield caplog


@pytest.mark.parametrize(
    ("make", "servers", "shards", "warns"),
    [
        (counting, 2, None, True),
        (counting, 1, None, False),
        (lambda p: torch.optim.Adam(p, lr=0.1), 2, 2, False),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), 2, 2, False),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), 2, None, False),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), 2, 2, True),
    ],
)
def test_a_rule_that_may_need_more_than_a_server_has_is_named(
    cluster: Any,
    said: pytest.LogCaptureFixture,
    make: Callable[[Any], torch.optim.Optimizer],
    servers: int,
    shards: int | None,
    warns: bool,
) -> None:
    c = cluster(workers=1, ps=servers, partitioner=None if shards is None else FixedShardsPartitioner(shards))
    job = Job(make, c)
    c.strategy.optimizer_number(job.optimizer)
    assert ("is not known to treat every element for itself" in said.text) is warns


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("together", [True, False])
def test_steps_that_only_some_servers_count_are_named(
    cluster: Any, said: pytest.LogCaptureFixture, servers: int, together: bool
) -> None:
    """Adam of ``train`` has one number of steps for all variables, of which each server keeps its own."""
    c = cluster(workers=1, ps=servers)
    with c.strategy.scope():
        first, second = td.Variable(1.0), td.Variable(2.0)
    optimizer = td.train.AdamOptimizer(0.1)
    for variable in (first, second):
        variables = [first, second] if together else [variable]
        optimizer.minimize(lambda: first * first + second * second, var_list=variables)
    assert ("Not every step of AdamOptimizer has gradients" in said.text) is (servers == 2 and not together)


def test_arguments_of_a_step_are_refused(cluster: Any) -> None:
    """The servers would make the step without them."""
    job = Job(counting, cluster(workers=1, ps=1))
    optimizer = job.optimizer

    def step() -> None:
        optimizer.step(scale=2.0)  # type: ignore[call-arg]

    job.cluster.coordinator.schedule(step)
    with pytest.raises(TypeError, match=r"step\(\) was called with scale"):
        job.cluster.coordinator.join(timeout=30)
    with pytest.raises(TypeError, match=r"step\(\) was called with scale"):
        step()  # in the coordinator's program


def test_packages_that_list_optimizers_by_name_find_one_of_each(cluster: Any) -> None:
    job = Job(lambda p: torch.optim.SGD(p, lr=0.1), cluster(workers=1, ps=1))
    optimizer = job.optimizer

    def names() -> list[str]:
        optimizer.step()
        found, left = [], [torch.optim.Optimizer]
        while left:
            found.append(left.pop())
            left += found[-1].__subclasses__()
        return [kind.__name__ for kind in found if not kind.__name__.startswith("_")]

    listed = job.cluster.coordinator.schedule(names).get(timeout=30)
    assert listed.count("SGD") == 1
