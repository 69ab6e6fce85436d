"""``train.Checkpoint`` of what lives on parameter servers: other numbers of servers, plain models, tables."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
OPTIMIZERS = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "train.Adam": lambda m: td.train.AdamOptimizer(0.05),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    # Without a bias before the normalization: its gradient would be noise, which Adam makes large.
    return torch.nn.Sequential(
        torch.nn.Linear(3, 7, bias=False), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 2)
    )


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))


def train(net: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss = net(x).square().sum()
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        optimizer.minimize(loss, var_list=list(net.parameters()))


class Job:
    """A model in training, on servers or in one process."""

    def __init__(self, kind: str, c: Any = None) -> None:
        self.coordinator = None if c is None else c.coordinator
        if c is None:
            self.net, self.count = model(), td.Variable(0, dtype=torch.int64)
        else:
            with c.strategy.scope():
                self.net, self.count = model(), td.Variable(0, dtype=torch.int64)
        self.optimizer = OPTIMIZERS[kind](self.net)
        self.checkpoint = td.train.Checkpoint(net=self.net, optimizer=self.optimizer, count=self.count, epoch=0)

    def steps(self, first: int, end: int) -> None:
        net, optimizer, count = self.net, self.optimizer, self.count

        def step(x: torch.Tensor) -> None:
            train(net, optimizer, x)
            count.assign_add(1)

        for number in range(first, end):
            if self.coordinator is None:
                step(batch(number))
            else:
                self.coordinator.schedule(step, args=(batch(number),))
                self.coordinator.join(timeout=30)

    def state(self) -> dict[str, torch.Tensor]:
        return {k: v.detach().clone() for k, v in self.net.state_dict().items()} | {
            "count": self.count.value().detach().clone()
        }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_goes_to_other_numbers_of_servers_and_to_plain_models(cluster: Any, tmp_path: Path, kind: str) -> None:
    """Saved after 3 steps on 2 servers, trained 2 more by three jobs of other shapes: all equal plain training."""
    plain = Job(kind)
    plain.steps(0, 5)
    first = Job(kind, cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2)))
    first.steps(0, 3)
    path = first.checkpoint.save(str(tmp_path / "ckpt"))
    others = [
        Job(kind, cluster(workers=1, ps=3, partitioner=FixedShardsPartitioner(3))),
        Job(kind, cluster(workers=1, ps=1)),
        Job(kind),
        first,
    ]
    for other in others:
        if other is first:
            other.steps(7, 9)  # to be undone
        other.checkpoint.restore(path).assert_consumed()
        other.steps(3, 5)
        torch.testing.assert_close(other.state(), plain.state(), rtol=1e-5, atol=1e-6)
    # And from a plain program to servers.
    source = Job(kind)
    source.steps(0, 3)
    path = source.checkpoint.save(str(tmp_path / "plain"))
    target = Job(kind, cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2)))
    target.checkpoint.restore(path).assert_consumed()
    target.steps(3, 5)
    torch.testing.assert_close(target.state(), plain.state(), rtol=1e-5, atol=1e-6)


def test_the_files_are_those_of_torch(cluster: Any, tmp_path: Path) -> None:
    """Sharded tensors are whole tensors for ``torch.distributed.checkpoint`` and for a reader without servers."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    job = Job("adam", cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2)))
    job.steps(0, 2)
    path = job.checkpoint.save(str(tmp_path / "ckpt"))
    reader = td.train.load_checkpoint(path)
    plain = model()
    plain.load_state_dict(reader.state_dict("net"))
    torch.testing.assert_close(dict(plain.state_dict()), dict(job.net.state_dict()))
    (folder,) = tmp_path.glob("ckpt-1.data-*")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=False)
    assert saved["net/0.weight"].shape == (7, 3)
    assert torch.equal(saved["net/0.weight"], plain[0].weight)
    with pytest.raises(InvalidArgumentError, match="shape"):
        td.train.Checkpoint(net=torch.nn.Sequential(torch.nn.Linear(4, 7))).restore(path)


def test_saving_while_training_goes_on(cluster: Any, tmp_path: Path) -> None:
    """A variable and its optimizer's state are of one moment: momentum of constant gradients tells the step."""
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=1.0)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    c.coordinator.schedule(step)
    c.coordinator.join(timeout=30)
    for _ in range(500):
        c.coordinator.schedule(step)
    checkpoint = td.train.Checkpoint(net=net, optimizer=optimizer)
    for number in range(4):
        path = checkpoint.save(str(tmp_path / "ckpt"), block=number % 2 == 0)
        checkpoint.sync()
        names = dict(td.train.list_variables(path))
        (slot,) = (name for name in names if "momentum_buffer" in name)
        steps = int(td.train.load_variable(path, slot))
        assert int(td.train.load_variable(path, "net/weight")) == -steps * (steps + 1) // 2
    c.coordinator.join(timeout=30)


def test_tables_never_pass_through_the_coordinator(cluster: Any, tmp_path: Path) -> None:
    """A table of 512 MB: the coordinator's memory does not grow by it."""
    rows = 1 << 21
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    table = c.strategy.embedding(rows, 64)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)

    def step(numbers: torch.Tensor) -> None:
        optimizer.zero_grad()
        (table(numbers) - 1.0).square().sum().backward()
        optimizer.step()

    numbers = torch.tensor([0, 5, rows // 2 - 1, rows // 2, rows - 1])
    c.coordinator.schedule(step, args=(numbers,))
    c.coordinator.join(timeout=30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = td.train.Checkpoint(table=table, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    found = table(numbers).detach()
    assert torch.equal(found, torch.ones(5, 64))
    other = cluster(workers=1, ps=3, partitioner=FixedShardsPartitioner(3))
    again = other.strategy.embedding(rows, 64)
    td.train.Checkpoint(table=again).restore(path).expect_partial()
    assert torch.equal(again(numbers).detach(), found)
    assert not again(torch.tensor([1, rows - 2])).detach().any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
