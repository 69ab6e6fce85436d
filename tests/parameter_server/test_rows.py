"""Embedding tables on servers: only the rows that are used travel."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn import functional as F

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner
from tfstyle_dist.parameter_server.client import pull

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
NUMBERS = torch.tensor([[1, 7, 1], [9, 0, 4]])


def table() -> torch.Tensor:
    return torch.arange(20.0).reshape(10, 2)


def test_very_many_rows_come_in_several_messages(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    monkeypatch.setattr(pull, "MOST_COPIED", 3 * 8 + 1)  # three rows and a bit
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    with c.strategy.scope():
        v = td.Variable(table())
    asked: list[int] = []
    for link in c.strategy.servers.links:
        batch = link.batch

        def counted(work: Any, operations: Any, *rest: Any, batch: Any = batch) -> None:
            asked.extend(operation.rows for operation in operations)
            batch(work, operations, *rest)

        monkeypatch.setattr(link, "batch", counted)
    numbers = torch.tensor([1, 7, 1, 9, 0, 4, 2, 2, 3, 5])
    assert torch.equal(v[numbers].detach(), table()[numbers])
    assert torch.equal(v[numbers[:0]].detach(), table()[:0])
    assert asked == [3, 2, 3]  # each row is asked for once


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_of_a_variable(cluster: Any, shards: int) -> None:
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(shards))
    with c.strategy.scope():
        v = td.Variable(table())

    def read() -> list[torch.Tensor]:
        return [v[NUMBERS], torch.nn.functional.embedding(NUMBERS, v), torch.index_select(v, 0, NUMBERS[0])]

    expected = [table()[NUMBERS], table()[NUMBERS], table()[NUMBERS[0]]]
    for found in (c.coordinator.schedule(read).get(timeout=30), read()):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.detach(), theirs)

    def gradient() -> torch.Tensor:
        (grad,) = td.train.gradients((v[NUMBERS] ** 2).sum(), [v])
        assert grad is not None
        assert grad.is_sparse
        return grad.to_dense()

    plain = table().requires_grad_()
    (plain[NUMBERS] ** 2).sum().backward()
    assert torch.equal(c.coordinator.schedule(gradient).get(timeout=30), plain.grad)

    def subtract() -> None:
        rows = torch.tensor([[1, 9, 1]])
        v.scatter_sub(torch.sparse_coo_tensor(rows, torch.ones(3, 2), (10, 2)))

    c.coordinator.schedule(subtract)
    c.coordinator.join(timeout=30)
    expected_table = table()
    expected_table[1] -= 2
    expected_table[9] -= 1
    assert torch.equal(v.value(), expected_table)

    def outside() -> torch.Tensor:
        return v[torch.tensor([3, 10])]

    wrong = c.coordinator.schedule(outside)
    with pytest.raises(td.errors.InvalidArgumentError, match="Row numbers"):
        wrong.get(timeout=30)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "momentum": lambda weight: torch.optim.SGD([weight], lr=0.1, momentum=0.9),
    "Adagrad": lambda weight: torch.optim.Adagrad([weight], lr=0.1, lr_decay=0.1),
    "SparseAdam": lambda weight: torch.optim.SparseAdam([weight], lr=0.1),
    "train Adagrad": lambda weight: td.train.AdagradOptimizer(0.1),
    "train Adam": lambda weight: td.train.AdamOptimizer(0.1),
    "train RMSProp": lambda weight: td.train.RMSPropOptimizer(0.1, momentum=0.9),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rows", [10, 5], ids=["of both shards", "of one shard at a time"])
def test_sparse_embeddings_train_as_in_one_process(cluster: Any, kind: str, rows: int) -> None:
    """A shard none of whose rows a step used makes the step too: it counts steps, and its momentum goes on."""

    def embedding() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(10, 2, sparse=True)

    def step(module: torch.nn.Embedding, optimizer: Any, seed: int) -> None:
        numbers = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(seed)) + seed % 2 * (10 - rows)
        loss = ((module(numbers) - 1.0) ** 2).sum()
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer.minimize(loss, var_list=[module.weight])
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    c = cluster(workers=2, ps=2, partitioner=FixedShardsPartitioner(2))
    with c.strategy.scope():
        module = embedding()
    optimizer = OPTIMIZERS[kind](module.weight)

    def scheduled(seed: int) -> None:
        step(module, optimizer, seed)

    for seed in range(5):
        c.coordinator.schedule(scheduled, args=(seed,))
        c.coordinator.join(timeout=30)
    plain = embedding()
    plain_optimizer = OPTIMIZERS[kind](plain.weight)
    for seed in range(5):
        step(plain, plain_optimizer, seed)
    torch.testing.assert_close(module.weight * 1, plain.weight * 1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 2}, {"padding_idx": -1}, {"max_norm": 0.5}, {"max_norm": 0.5, "norm_type": 1.0, "padding_idx": 2}],
    ids=lambda options: ", ".join(options),
)
def test_the_options_of_an_embedding(cluster: Any, options: dict[str, Any], shards: int) -> None:
    def embedding() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(10, 2, sparse=True, **options)

    def step(module: torch.nn.Embedding, optimizer: Any, seed: int) -> None:
        optimizer.zero_grad()
        numbers = torch.randint(0, 10, (3, 2), generator=torch.Generator().manual_seed(seed))
        (module(numbers) - 1.0).square().sum().backward()
        optimizer.step()

    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(shards))
    with c.strategy.scope():
        module = embedding()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)

    def scheduled(seed: int) -> None:
        step(module, optimizer, seed)

    plain = embedding()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for seed in range(4):
        c.coordinator.schedule(scheduled, args=(seed,))
        c.coordinator.join(timeout=30)
        step(plain, plain_optimizer, seed)
    torch.testing.assert_close(module.weight * 1, plain.weight * 1)


@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
def test_a_bound_of_rows_of_a_variable(cluster: Any, function: Callable[..., torch.Tensor]) -> None:
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    with c.strategy.scope():
        v = td.Variable(table())

    def bounded() -> torch.Tensor:
        return function(NUMBERS, v, max_norm=3.0)

    plain = table()
    expected = function(NUMBERS, plain, max_norm=3.0)
    torch.testing.assert_close(c.coordinator.schedule(bounded).get(timeout=30), expected)
    torch.testing.assert_close(v.value(), plain)


def test_a_bound_makes_as_many_writes_when_it_is_tried_again(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes of a function are counted: the ones of an earlier attempt are not made twice."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        v = td.Variable(table())
    servers, written = c.strategy.servers, []
    original = servers.add_rows
    monkeypatch.setattr(servers, "add_rows", lambda r, rows, values: (written.append(rows), original(r, rows, values)))
    for _ in range(2):
        F.embedding(NUMBERS, v, max_norm=3.0)
    assert len(written) == 2
    assert torch.equal(*written)


def test_a_table_larger_than_the_worker(cluster: Any) -> None:
    """A table of 4 GB on the servers, a worker that may not have more than 1 GB of data."""
    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    rows = 1 << 24
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = c.strategy.embedding(rows, 64)
    assert module.weight.shape == (rows, 64)
    module.padding_idx = 7
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

    def step(numbers: torch.Tensor) -> int:
        optimizer.zero_grad()
        (module(numbers) - 1.0).square().sum().backward()
        optimizer.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    numbers = torch.tensor([0, 5, rows - 1, rows // 2, 7])
    used = c.coordinator.schedule(step, args=(numbers,)).get(timeout=60)
    assert used < 1 << 20  # KiB
    found = module(numbers)
    torch.testing.assert_close(found.detach(), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])[:, None].expand(5, 64))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


LOOKUPS: dict[str, Callable[[torch.nn.Embedding, torch.Tensor], torch.Tensor]] = {
    "called": lambda module, numbers: module(numbers),
    "indexed": lambda module, numbers: module.weight[numbers],
    "selected": lambda module, numbers: module.weight.index_select(0, numbers),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("how", LOOKUPS)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_the_coordinators_own_steps_have_the_gradients_of_torch(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, how: str, shared_memory: str
) -> None:
    """Dense ones, unless the module asks for rows: the norm is taken of them, and Adam updates every row."""
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared_memory)

    def step(module: torch.nn.Embedding, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
        numbers = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        (LOOKUPS[how](module, numbers) - 1.0).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        return norm

    def made() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(10, 2, padding_idx=3)

    c = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2))
    with c.strategy.scope():
        module, rows = made(), torch.nn.Embedding(10, 2, sparse=True)
    plain = made()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, plain)]
    for seed in range(4):
        torch.testing.assert_close(step(module, optimizers[0], seed), step(plain, optimizers[1], seed))
    torch.testing.assert_close(module.weight * 1, plain.weight * 1)
    module(NUMBERS).sum().backward()
    rows(NUMBERS).sum().backward()
    assert [one.weight.grad.is_sparse for one in (module, rows)] == [False, True]


class Learner:
    """One tensor on the servers, or on one device, whose rows are picked and which is read whole."""

    def __init__(self, kind: str, strategy: Any = None) -> None:
        torch.manual_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            if kind == "of the servers" and strategy:
                module = strategy.embedding(10, 2, initializer=("constant", 0.5, 0.0))
            else:
                module = torch.nn.Embedding(10, 2, sparse=kind != "dense")
                if kind == "of the servers":
                    module.weight.data.fill_(0.5)
        self.module, self.weight = module, module.weight
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def rows(self) -> torch.Tensor:
        return self.module(NUMBERS).square().sum()

    def whole(self) -> torch.Tensor:
        return (self.weight * 3.0).sigmoid().sum()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("shared_memory", ["1", "0"])
@pytest.mark.parametrize("kind", ["dense", "sparse", "of the servers"])
@pytest.mark.parametrize("reads", ["rows whole", "whole rows", "rows whole rows"])
def test_the_coordinator_reads_rows_and_the_whole(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, kind: str, reads: str, shared_memory: str
) -> None:
    """As a language model does that has one table for its words and its output: the gradient is that of both."""
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared_memory)
    c = cluster(workers=1, ps=1)
    here, there = Learner(kind), Learner(kind, c.strategy)
    for _ in range(3):
        for one in (here, there):
            one.optimizer.zero_grad()
            sum(getattr(one, read)() for read in reads.split()).backward()
        gradients = [
            one.weight.grad.to_dense() if one.weight.grad.is_sparse else one.weight.grad for one in (there, here)
        ]
        torch.testing.assert_close(*gradients)
        for one in (here, there):
            one.optimizer.step()
    torch.testing.assert_close(there.weight * 1, here.weight * 1)


def test_a_gradient_outlives_a_value_that_changes(cluster: Any) -> None:
    """Micro-batches of the coordinator between which the value changes, and a graph that is older than the change."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        layer = torch.nn.Linear(2, 1, bias=False)

    layer(torch.ones(1, 2)).sum().backward()
    later = layer(torch.full((1, 2), 10.0)).sum()
    before = (layer.weight * 1).detach()
    layer.weight.data = before + 1.0
    torch.testing.assert_close((layer.weight * 1).detach(), before + 1.0)
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    later.backward()
    assert layer.weight.grad.tolist() == [[11.0, 11.0]]
    layer(torch.full((1, 2), 100.0)).sum().backward()
    assert layer.weight.grad.tolist() == [[111.0, 111.0]]


def test_what_was_read_in_inference_mode_can_be_trained(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    torch.manual_seed(0)
    with c.strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    inputs = torch.ones(4, 2)
    for _ in range(2):
        with torch.inference_mode():
            before = model(inputs).clone()
        model(inputs).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.inference_mode():
        assert model(inputs).sum() < before.sum()
    for parameter in model.parameters():
        parameter.data.mul_(0.0)
    assert not model(inputs).any()


@pytest.mark.parametrize("shards", [1, 3])
def test_row_numbers_from_the_end(cluster: Any, shards: int) -> None:
    """An index of numbers may be negative, as in torch; ``embedding`` refuses that, and what is out of range."""
    c = cluster(workers=1, ps=2, partitioner=None if shards == 1 else FixedShardsPartitioner(shards))
    with c.strategy.scope():
        value = td.Variable(table())
    numbers = torch.tensor([[0, -1], [-10, 4]])

    def picked() -> torch.Tensor:
        return value[numbers]

    assert torch.equal(value[numbers], table()[numbers])
    assert torch.equal(c.coordinator.schedule(picked).get(timeout=30), table()[numbers])
    for wrong, told in (([0, 10], r"0\.\.10"), ([-11, 3], r"-11\.\.3")):
        with pytest.raises(InvalidArgumentError, match=rf"Row numbers {told} .* give numbers from (0|-10) to 9"):
            value[torch.tensor(wrong)]
    with pytest.raises(InvalidArgumentError, match=r"Row numbers -1\.\.3 do not fit .* of 10 rows"):
        F.embedding(torch.tensor([3, -1]), value)
