"""What a model may be and do under ``StrategyAccelerator``: sparse gradients, attributes, buffers, its own state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate_state import no_accelerate_state  # noqa: F401
from on_devices import IS_CUDA
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.integrations.accelerate import StrategyAccelerator
from tfstyle_dist.integrations.accelerate.auxiliary_losses import mean_of

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
    """As layers with experts: leaves losses on itself."""

    def __init__(self, inputs: int = 3) -> None:
        super().__init__()
        self.inner, self.calls, self.table = nn.Linear(inputs, 2), 0, None
        self.register_buffer("seen", torch.zeros(()))
        self.kept: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.seen += 1
        self.calls += 1
        self.aux = out.abs().mean()
        self.losses = []
        self.losses.append(out.pow(2).mean())
        self.by_name = {"pair": (out.mean(), self.aux)}
        self.kept.append(out.sum())
        if self.table is None:
            self.table = torch.arange(2.0)
        self.features = out
        return out + self.seen


@pytest.fixture
def accelerator() -> Iterator[StrategyAccelerator]:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield StrategyAccelerator(strategy=strategy, cpu=not IS_CUDA)


@pytest.mark.parametrize("count", [5, 4, 1])
@pytest.mark.parametrize("learns", [True, False])
def test_losses_that_a_forward_leaves_on_modules_are_those_of_the_whole_batch(
    accelerator: StrategyAccelerator, count: int, learns: bool
) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(Balanced(), Balanced(2))
    model = nn.Sequential(Balanced(), Balanced(2))
    model.load_state_dict(alone.state_dict())
    prepared, shares = accelerator.prepare(model), min(count, 2)
    x, lists = torch.randn(count, 3), []
    with torch.set_grad_enabled(learns):
        for number in range(1, 4):
            torch.testing.assert_close(prepared(x), alone(x))
            for ours, theirs in zip(model, alone, strict=True):
                assert (ours.seen, ours.calls, len(ours.kept)) == (number, number * shares, number * shares)
                for name in ("aux", "losses", "by_name", "table"):
                    torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
                last = count - count * (shares - 1) // shares  # of the last share
                torch.testing.assert_close(ours.features, theirs.features[-last:])
            lists.append(model[0].losses)
    assert len({id(made) for made in lists}) == 3
    if learns:
        for of in (model, alone):
            sum(part.aux + sum(part.losses) + sum(part.by_name["pair"]) for part in of).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


def test_a_model_without_inputs_leaves_its_loss(accelerator: StrategyAccelerator) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> torch.Tensor:
            self.aux = (2 * self.weight).sum()
            return self.aux

    model = Constant()
    accelerator.prepare(model)().backward()
    model.zero_grad()
    accelerator.prepare(model)()
    assert float(model.aux.detach()) == 4
    model.aux.backward()
    assert model.weight.grad.tolist() == [2, 2]


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


def test_what_is_no_loss_is_not_changed() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert mean_of([loss, None], [0.5, 0.5]) is None
    assert mean_of([loss.reshape(1), loss.reshape(1)], [0.5, 0.5]) is None
    assert mean_of([torch.ones(()), torch.ones(())], [0.5, 0.5]) is None
    assert mean_of([1.0, 2.0], [0.5, 0.5]) is None
    assert mean_of([[], []], [0.5, 0.5]) is None
    assert mean_of([[loss], [loss, loss]], [0.5, 0.5]) is None
    assert mean_of([{"a": loss}, {"b": loss}], [0.5, 0.5]) is None
    assert mean_of([{"a": (loss, 3)}, {"a": (loss, 3)}], [0.5, 0.5]) is None
    assert mean_of([{"a": (loss,)}, {"a": (2 * loss,)}], [0.25, 0.75]) == {"a": (3.5,)}


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_model_that_was_not_prepared_is_said(prepared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its gradients would stay those of each process."""
    accelerator = StrategyAccelerator(tfd.MirroredStrategy(["cpu:0"]))
    model = nn.Linear(2, 1)
    if prepared:
        model = accelerator.prepare(model)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    told = [message for message in caplog.messages if "was not given to accelerator.prepare" in message]
    assert len(told) == (not prepared)
