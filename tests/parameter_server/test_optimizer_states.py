"""``optimizer.state_dict()`` and ``load_state_dict`` where parameter servers hold the state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn import functional as F

import tfstyle_dist as td
from tfstyle_dist.core import logging
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner
from tfstyle_dist.parameter_server.client import optimizer_slots, server_functions
from tfstyle_dist.parameter_server.server.slots import take_slots
from tfstyle_dist.variables import find_record

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Prepared(torch.optim.SGD):
    """Its constructor makes state for each parameter, and its rule counts on it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["scale"], self.state[p]["times"] = torch.full_like(p, 0.5), 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(self.state[p]["scale"])
                self.state[p]["scale"].mul_(0.9)
                self.state[p]["times"] += 1
        super().step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "prepared": lambda p: Prepared(p, lr=0.1),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    wide = {"dtype": torch.float64}
    return torch.nn.Sequential(torch.nn.Linear(4, 7, **wide), torch.nn.Tanh(), torch.nn.Linear(7, 2, **wide))


class Job:
    """A model in training, on servers or in one process."""

    def __init__(self, kind: str, cluster: Any = None) -> None:
        self.cluster = cluster
        if cluster is None:
            self.net = model()
        else:
            with cluster.strategy.scope():
                self.net = model()
        self.optimizer = OPTIMIZERS[kind](self.net.parameters())

    def train(self, seeds: range) -> None:
        net, optimizer = self.net, self.optimizer

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.mse_loss(net(x), x[:, :2]).backward()
            optimizer.step()

        for seed in seeds:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            if self.cluster is None:
                step(x)
            else:
                self.cluster.coordinator.schedule(step, args=(x,))
                self.cluster.coordinator.join(timeout=30)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])

    def states(self) -> tuple[Any, Any]:
        return copy.deepcopy(self.net.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    def load(self, states: tuple[Any, Any]) -> None:
        self.net.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])


def same(found: Any, expected: Any) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for place, slots in expected["state"].items():
        torch.testing.assert_close(found["state"][place], slots, rtol=1e-12, atol=1e-12)
    assert found["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_go_from_one_process_to_servers_and_back(
    cluster: Any, kind: str, shards: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded before the servers have heard of the optimizer, and after."""
    monkeypatch.setattr(optimizer_slots, "_AT_A_TIME", 40)  # several answers for a tensor
    reference = Job(kind)
    reference.train(range(3))
    early = reference.states()
    reference.train(range(3, 5))
    late = reference.states()
    reference.train(range(5, 6))

    c = cluster(workers=1, ps=2, partitioner=None if shards is None else FixedShardsPartitioner(shards))
    job = Job(kind, c)
    job.load(early)
    job.train(range(3, 5))
    same(job.optimizer.state_dict(), late[1])
    job.train(range(5, 6))
    torch.testing.assert_close(job.weights(), reference.weights(), rtol=1e-12, atol=1e-12)

    job.load(early)
    job.train(range(3, 5))
    last = Job(kind)
    last.load(job.states())
    last.train(range(5, 6))
    torch.testing.assert_close(last.weights(), reference.weights(), rtol=1e-12, atol=1e-12)


def test_an_empty_state_begins_anew(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    job, fresh = Job("momentum", c), Job("momentum")
    empty = fresh.states()
    job.train(range(3))
    job.load(empty)
    assert job.optimizer.state_dict()["state"] == {}
    for each in (job, fresh):
        each.train(range(3, 5))
    torch.testing.assert_close(job.weights(), fresh.weights(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_function_cannot_ask_for_the_state(cluster: Any, name: str) -> None:
    c = cluster(workers=1, ps=1)
    optimizer = Job("momentum", c).optimizer
    arguments = () if name == "state_dict" else (optimizer.state_dict(),)

    def ask() -> None:
        getattr(optimizer, name)(*arguments)

    c.coordinator.schedule(ask)
    with pytest.raises(RuntimeError, match="The state of SGD is on the parameter servers"):
        c.coordinator.join(timeout=30)


def test_a_state_that_was_loaded_is_in_a_checkpoint_before_any_function_ran(cluster: Any, tmp_path: Path) -> None:
    reference = Job("adam")
    reference.train(range(2))
    job, restored = Job("adam", cluster(workers=1, ps=1)), Job("adam")
    job.load(reference.states())
    saved = td.train.Checkpoint(net=job.net, optimizer=job.optimizer).save(tmp_path / "ckpt")
    td.train.Checkpoint(net=restored.net, optimizer=restored.optimizer).restore(saved).assert_consumed()
    same(restored.optimizer.state_dict(), reference.optimizer.state_dict())


def sparse_table(c: Any) -> tuple[torch.nn.Embedding, torch.optim.Optimizer, Callable[[torch.Tensor], None]]:
    with c.strategy.scope():
        table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        table(rows).sum().backward()
        optimizer.step()

    return table, optimizer, step


@pytest.mark.parametrize("row", [0, 5])
def test_the_state_of_a_table_of_which_a_step_used_one_shard(cluster: Any, row: int, tmp_path: Path) -> None:
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    table, optimizer, step = sparse_table(c)
    for _ in range(2):
        c.coordinator.schedule(step, args=(torch.tensor([row]),))
    c.coordinator.join(timeout=30)
    state = optimizer.state_dict()["state"][0]
    assert state["step"] == 2
    used = state["exp_avg"].abs().sum(1) > 0
    assert used.tolist() == [place == row for place in range(6)]

    saved = td.train.Checkpoint(table=table, optimizer=optimizer).save(tmp_path / "ckpt")
    plain = torch.nn.Embedding(6, 2, sparse=True)
    restored = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    td.train.Checkpoint(table=plain, optimizer=restored).restore(saved).assert_consumed()
    same(restored.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("place", [0, 1])
def test_a_state_of_some_shards_alone_is_refused(cluster: Any, place: int, tmp_path: Path) -> None:
    """As while the first step is being made: half of it would look like the whole, or like none."""
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    table, optimizer, step = sparse_table(c)
    number = c.strategy.optimizer_number(optimizer)
    shard = find_record(table.weight).shards[place]
    half = {"step": 1, "exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2)}
    job = server_functions.start(c.strategy.servers, shard.server, take_slots, number, [(shard.number, half)])
    server_functions.wait(c.strategy.servers, [job])
    checkpoint = td.train.Checkpoint(table=table, optimizer=optimizer)
    for ask in (optimizer.state_dict, lambda: checkpoint.save(tmp_path / "ckpt")):
        with pytest.raises(RuntimeError, match="Only some of the 2 shards of 'weight' have made a first step"):
            ask()
    c.coordinator.schedule(step, args=(torch.tensor([0]),))
    c.coordinator.join(timeout=30)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (6, 2)
    checkpoint.save(tmp_path / "ckpt")


class Averaging(torch.optim.SGD):
    """As Schedule-Free's optimizers: ``eval()`` puts the mean of all weights in the place of the last ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p, 1 / state["steps"])

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "mean" in state:
                p.copy_(state["mean"])


def test_methods_of_an_optimizer_find_its_state(cluster: Any) -> None:
    weights = []
    for c in (None, cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))):
        job = Job("momentum", c)
        job.optimizer = Averaging(job.net.parameters(), lr=0.1)
        job.train(range(3))
        job.optimizer.eval()
        job.train(range(3, 4))
        weights.append(job.weights())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-12, atol=1e-12)


def _starts_again(kind: str) -> bool:
    """Whether this torch makes a state anew that a program took away; Adagrad of 2.9 does not."""
    job = Job(kind)
    job.optimizer.state.clear()
    try:
        job.train(range(1))
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_what_is_read_and_written_in_the_state_is_the_servers(cluster: Any, kind: str) -> None:
    jobs = Job(kind), Job(kind, cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2)))
    for number in range(3):
        read = []
        for job in jobs:
            job.train(range(2 * number, 2 * number + 2))
            state, parameters = job.optimizer.state, list(job.net.parameters())
            read.append({name: value * 1 for name, value in state[parameters[0]].items()})
            assert len(state) == len(parameters)
            if number == 0:
                next(value for name, value in state[parameters[0]].items() if name != "step").mul_(0.5)
            elif number == 1:
                if _starts_again(kind):
                    state.pop(parameters[0])
                state[parameters[1]] = copy.deepcopy(state[parameters[1]])
        assert [*read[0]] == [*read[1]]
        for name, value in read[0].items():
            torch.testing.assert_close(read[1][name], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(jobs[1].weights(), jobs[0].weights(), rtol=1e-12, atol=1e-12)


def test_a_write_to_the_state_is_in_a_checkpoint(cluster: Any, tmp_path: Path) -> None:
    job, restored = Job("momentum", cluster(workers=1, ps=1)), Job("momentum")
    job.train(range(1))
    for p in job.net.parameters():
        job.optimizer.state[p]["momentum_buffer"].fill_(0.25)
    saved = td.train.Checkpoint(net=job.net, optimizer=job.optimizer).save(tmp_path / "ckpt")
    td.train.Checkpoint(net=restored.net, optimizer=restored.optimizer).restore(saved).assert_consumed()
    for p in restored.net.parameters():
        assert (restored.optimizer.state[p]["momentum_buffer"] == 0.25).all()


def test_a_write_to_a_former_entry_is_said(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "_said", set())
    monkeypatch.setattr(logging.get_logger(), "propagate", True)
    job = Job("momentum", cluster(workers=1, ps=1))
    job.train(range(1))
    entry = job.optimizer.state[next(job.net.parameters())]
    job.train(range(1))
    entry["momentum_buffer"].zero_()
    job.train(range(1))
    assert "before it scheduled a function: that is lost" in caplog.text


def test_a_function_sees_the_settings_of_the_coordinators_program(cluster: Any) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def settings() -> tuple[float, tuple[float, float]]:
        group = optimizer.param_groups[0]
        return float(group["lr"]), group["betas"]

    for number in range(3):
        found = [c.coordinator.schedule(settings) for _ in range(4)]
        c.coordinator.join(timeout=30)
        assert [each.get() for each in found] == [(0.5 ** (number + 1), (0.8 - number / 8, 0.9))] * 4
        scheduler.step()
        optimizer.param_groups[0]["betas"] = (0.8 - (number + 1) / 8, 0.9)


def test_an_entry_that_was_read_before_it_was_there_takes_nothing_away(cluster: Any) -> None:
    """A program may look into the state while the first function is at work."""
    job, reference = Job("momentum", cluster(workers=1, ps=1)), Job("momentum")
    job.cluster.strategy.optimizer_number(job.optimizer)
    entries = [job.optimizer.state[p] for p in job.net.parameters()]
    assert entries == [{}] * 4
    for each in (job, reference):
        each.train(range(2))
    assert all("momentum_buffer" in job.optimizer.state[p] for p in job.net.parameters())
    for each in (job, reference):
        each.train(range(2, 4))
    torch.testing.assert_close(job.weights(), reference.weights(), rtol=1e-12, atol=1e-12)


def test_the_state_is_a_dict_like_any(cluster: Any) -> None:
    job = Job("momentum", cluster(workers=1, ps=1))
    job.train(range(2))
    state, (one, two, three, four) = job.optimizer.state, job.net.parameters()
    held = state[one]
    assert state.setdefault(one, {}) is held
    del state[two]
    state[three] = {}
    state.update({four: {"momentum_buffer": torch.ones_like(state[four]["momentum_buffer"])}})
    copied = copy.deepcopy(job.optimizer)
    assert len(copied.state_dict()["state"]) == 3
    copied.load_state_dict(copied.state_dict())
    job.cluster.coordinator.schedule(int)
    job.cluster.coordinator.join(timeout=30)
    assert [bool(state[p]) for p in (one, two, three, four)] == [True, False, False, True]
    assert (state[four]["momentum_buffer"] == 1).all()
