"""Buffers that are sparse, as the neighbours in a graph are, or of another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.errors import CollectiveMismatchError

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.cpu_only("the pretend device has few operations of sparse tensors"),
    *(
        pytest.mark.filterwarnings(f"ignore:{said}")
        for said in (
            ".*quantize_per_tensor",
            "Sparse .* tensor support",
            "The PyTorch API of nested",
            "Sparse invariant checks",
        )
    ),
]
Layout = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Layout] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
}


class Graph(nn.Module):
    """A layer on the mean of each node's neighbours."""

    def __init__(self, neighbours: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("neighbours", neighbours)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        return self.layer(self.neighbours.to_dense() @ nodes)


def _train(strategy: Any, model: Graph) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = torch.arange(12.0).reshape(4, 3)

    def step() -> None:
        optimizer.zero_grad()
        model(nodes).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    return model.layer.weight.detach().clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_of_one_process(layout: str) -> None:
    wanted = _train(tfd.OneDeviceStrategy("cpu:0"), Graph(LAYOUTS[layout](torch.eye(4))))
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = Graph(LAYOUTS[layout](torch.eye(4)))
        torch.testing.assert_close(_train(strategy, model), wanted)

        def change() -> None:
            model.neighbours = model.neighbours * (1.0 + tfd.get_replica_context().replica_id_in_sync_group)

        def read() -> torch.Tensor:
            return model.neighbours.to_dense().sum()

        strategy.run(change)
        assert [float(v) for v in strategy.run(read).values] == [4.0, 8.0]
        strategy.sync_buffers()  # what has no mean becomes the first replica's
        assert [float(v) for v in strategy.run(read).values] == [4.0, 4.0]


@pytest.mark.distributed(workers=2, timeout=60)
def test_ranks_begin_with_the_first_ones(rank: int) -> None:
    first, other = torch.eye(4), torch.triu(torch.ones(4, 4))  # also with another number of elements
    mine = first if rank == 0 else other
    for kind in (tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy):
        for name, layout in LAYOUTS.items():
            wanted = _train(tfd.OneDeviceStrategy("cpu:0"), Graph(layout(first)))
            with kind(["cpu:0"]) as strategy:
                with strategy.scope():
                    model = Graph(layout(mine))
                torch.testing.assert_close(model.neighbours.to_dense(), first, msg=name)
                assert model.neighbours.layout is layout(first).layout
                torch.testing.assert_close(_train(strategy, model), wanted, msg=name)
                model.neighbours = layout(mine)
                strategy.sync_buffers()
                torch.testing.assert_close(model.neighbours.to_dense(), first, msg=name)
    with tfd.MirroredStrategy(["cpu:0"]) as strategy:
        places = torch.tensor([[0, 1], [2, 0], [3, 3]]).t()  # a list of edges, as columns that are not contiguous
        edges = torch.sparse_coo_tensor(places, torch.ones(1).expand(3), (4, 4))
        columns = torch.arange(16.0).reshape(4, 4).to_sparse_bsr((2, 2)).t()
        for first_ones in (torch.zeros(4, 4).to_sparse(), edges, columns):
            with strategy.scope():
                model = Graph(first_ones if rank == 0 else 3 * first_ones)
            torch.testing.assert_close(model.neighbours.to_dense(), first_ones.to_dense())
    differ = pytest.raises(CollectiveMismatchError, match=r"built different models.*torch\.sparse_cs")
    with tfd.MirroredStrategy(["cpu:0"]) as strategy, differ, strategy.scope():
        model = Graph(first.to_sparse_csr() if rank == 0 else first.to_sparse_csc())
    with tfd.MirroredStrategy(["cpu:0"]) as strategy, strategy.scope():
        for odd in (torch.nested.nested_tensor([first[:1], first[:2]]), first.to_mkldnn()):
            with pytest.raises(TypeError, match=r"A buffer of layout .* cannot be sent to the other workers"):
                Graph(odd)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_type_of_the_whole_model(layout: str) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = Graph(LAYOUTS[layout](torch.eye(4)))
        strategy.run(lambda: model(torch.ones(4, 3)).sum().backward())
        model.double()
        found = strategy.run(lambda: model(torch.ones(4, 3).double()).detach())
        assert [value.dtype for value in found.values] == [torch.float64] * 2
        torch.testing.assert_close(*found.values)


def test_an_elastic_job_refuses_what_it_cannot_send() -> None:
    elastic = tfd.experimental.Elastic(replicas=2)
    with tfd.MultiWorkerMirroredStrategy(elastic=elastic) as strategy, strategy.scope():
        nested, dense = torch.nested.nested_tensor([torch.ones(1)]), torch.ones(2)
        for odd in (nested, torch.quantize_per_tensor(dense, 1, 0, torch.qint8), dense.to_mkldnn()):
            with pytest.raises(TypeError, match=r"A buffer of layout .* cannot be sent to the other workers"):
                Graph(odd)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_elastic_job(layout: str) -> None:
    wanted = _train(tfd.OneDeviceStrategy("cpu:0"), Graph(LAYOUTS[layout](torch.eye(4))))
    elastic = tfd.experimental.Elastic(replicas=2)
    with tfd.MultiWorkerMirroredStrategy(elastic=elastic) as strategy:
        with strategy.scope():
            model = Graph(LAYOUTS[layout](torch.eye(4)))
        torch.testing.assert_close(_train(strategy, model), wanted)
        strategy.sync_buffers()
        torch.testing.assert_close(model.neighbours.to_dense(), torch.eye(4))


def test_what_has_neither_one_memory_nor_parts() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        with strategy.scope():
            model = nn.Linear(2, 2)
            model.register_buffer("nested", nested)
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
        strategy.sync_buffers()
        assert [t.tolist() for t in model.nested.unbind()] == [[1.0], [1.0, 1.0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.triu(torch.ones(4, 4)))
    made = sparse_parts.assemble(sparse_parts.about(tensor), sparse_parts.parts_of(tensor))
    assert made.layout is tensor.layout
    torch.testing.assert_close(made.to_dense(), tensor.to_dense())
    with pytest.raises(ValueError, match="is no sparse tensor"):
        sparse_parts.assemble(["strided", [4, 4], True], sparse_parts.parts_of(tensor))
    target = LAYOUTS[layout](torch.eye(4))
    sparse_parts.fill(target, tensor)
    torch.testing.assert_close(target.to_dense(), tensor.to_dense())


def test_parts_that_are_not_coalesced() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (3, 3))
    made = sparse_parts.assemble(sparse_parts.about(tensor), sparse_parts.parts_of(tensor))
    assert not made.is_coalesced()
    assert float(made.to_dense()[0, 1]) == 3.0
    outside = [torch.tensor([[7], [0]]), torch.tensor([1.0])]
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        sparse_parts.assemble(["sparse_coo", [3, 3], True], outside)
