"""What a model may be and do under ``StrategyAccelerator``: sparse gradients, attributes, buffers, its own state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate_state import no_accelerate_state  # noqa: F401
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.integrations.accelerate import StrategyAccelerator
from tfstyle_dist.integrations.accelerate.attributes import joined

BATCHES = [torch.arange(8).reshape(8, 1) % (5 + number) for number in range(3)]


def table() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(4, 2))


def train(model: nn.Module, bare: nn.Module, backward: Any, share: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    for batch in BATCHES:
        backward(model(batch[share]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in bare.parameters()]


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("method", ["ADD_N", "EXPERIMENTAL_TREE"])
def test_sparse_gradients_of_ranks(rank: int, replicas: int, method: str) -> None:
    expected = train(model := table(), model, torch.Tensor.backward, slice(None))
    ops = tfd.ReductionToOneDevice(aggregation_method=getattr(tfd.AggregationMethod, method))
    with tfd.MirroredStrategy([f"cpu:{place}" for place in range(replicas)], cross_device_ops=ops) as strategy:
        accelerator = StrategyAccelerator(strategy=strategy)
        prepared = accelerator.prepare(table())
        bare = accelerator.unwrap_model(prepared)
        found = train(prepared, bare, accelerator.backward, slice(4 * rank, 4 * rank + 4))
    torch.testing.assert_close(found, expected)


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_prepared_model_takes_its_own_state(replicas: int) -> None:
    with tfd.MirroredStrategy([f"cpu:{place}" for place in range(replicas)]) as strategy:
        prepared = StrategyAccelerator(strategy=strategy).prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        state = {name: torch.full_like(tensor, 3) for name, tensor in prepared.state_dict().items()}
        assert prepared.load_state_dict(state) == ([], [])
        assert all((tensor == 3).all() for tensor in prepared.state_dict().values())
        with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
            prepared.load_state_dict(state | {"module.other": torch.ones(1)})


class Balanced(nn.Module):
    """As layers with experts: leaves a loss, what it saw, and counts, on itself and in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.rate = nn.Linear(3, 2), 0, 1.0
        self.register_buffer("seen", torch.zeros(()))
        self.table: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self.by_name: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.calls += 1
        self.rate *= 0.5
        self.seen += 1
        if self.table is None:
            self.table = torch.arange(2.0)
        self.losses.append(out.pow(2).mean())
        self.by_name["last"] = self.aux = out.abs().mean()
        self.features = out.detach()
        return out + self.seen


@pytest.fixture
def accelerator() -> Iterator[StrategyAccelerator]:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield StrategyAccelerator(strategy=strategy, cpu=True)


@pytest.mark.parametrize("count", [5, 4, 1])
def test_what_a_forward_leaves_on_modules_is_that_of_the_whole_batch(
    accelerator: StrategyAccelerator, count: int
) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(Balanced(), Balanced())
    alone[1].inner = nn.Linear(2, 2)
    model = nn.Sequential(Balanced(), Balanced())
    model[1].inner = nn.Linear(2, 2)
    model.load_state_dict(alone.state_dict())
    lists = [part.losses for part in model]
    prepared = accelerator.prepare(model)
    x = torch.randn(count, 3)
    for number in range(1, 4):
        torch.testing.assert_close(prepared(x), alone(x))
        for ours, theirs, losses in zip(model, alone, lists, strict=True):
            assert ours.losses is losses
            assert len(losses) == number
            torch.testing.assert_close(losses, theirs.losses)
            assert (ours.calls, ours.rate, ours.seen) == (number, theirs.rate, number)
            for name in ("table", "features", "aux", "by_name"):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    for of in (model, alone):
        sum(part.aux + sum(part.losses) + part.by_name["last"] for part in of).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


class Adapted(nn.Module):
    """A frozen layer with an adapter, which looks what is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.adapter, self.trained = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2), [True]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trained = [self.base.weight.requires_grad, self.adapter.weight.requires_grad, self.base(x).requires_grad]
        return self.base(x) + self.adapter(x)


def test_frozen_parameters_have_no_gradients_on_replicas(accelerator: StrategyAccelerator) -> None:
    model, alone, x = Adapted(), Adapted(), torch.ones(4, 3)
    prepared = accelerator.prepare(model)
    for frozen in ("base", "adapter", None):
        for of in (model, alone):
            of.base.requires_grad_(frozen != "base")
            of.adapter.requires_grad_(frozen != "adapter")
            of.zero_grad()
            (prepared if of is model else alone)(x).sum().backward()
        assert model.trained == alone.trained
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
    model.requires_grad_(False)
    assert not prepared(x).requires_grad


def test_what_is_not_known_to_belong_to_the_examples_is_that_of_the_first_replica() -> None:
    one, two = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    assert joined([one, two], [4, 4]) is one
    assert joined([one, None], [2, 2]) is one
    assert joined(["a", "b"], [2, 2]) == "a"
    assert joined([[1.0], [1.0, 2.0]], [2, 2]) == [1.0]
    assert joined([(1.0, 3), (4.0, 5)], [1, 2]) == (3.0, 3)
