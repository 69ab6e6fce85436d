"""Gradients of second derivatives, and of sparse, tied, frozen, checkpointed and custom parts of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from two_replicas import (
    assert_all_close,
    both_process_models,
    built,
    examples,
    flat_gradients,
    flat_weights,
    gradients,
    half,
    mse,
    on_all,
    plain,
    replica,
    small,
    weights,
)

import tfstyle_dist as td


@both_process_models
def test_autograd_grad_is_local(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    found = on_all(strategy, lambda: torch.autograd.grad(mse(model, half()), [*model.parameters()])[0])
    halves = zip(*(part.chunk(2) for part in examples()), strict=True)
    local = [torch.autograd.grad(mse(reference, h), [*reference.parameters()])[0] for h in halves]
    torch.testing.assert_close(found, torch.stack(local), rtol=1e-11, atol=0)
    assert torch.isnan(gradients(strategy, model)).all()


def _penalised(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = mse(model, batch)
    found = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return loss + 0.1 * sum((g**2).sum() for g in found)


@both_process_models
def test_gradient_penalty(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    strategy.run(lambda: _penalised(model, half()).backward())
    for features, target in zip(*(part.chunk(2) for part in examples()), strict=True):
        (_penalised(reference, (features, target)) / 2).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    strategy.run(lambda: mse(model, half()).backward(create_graph=True))
    mse(reference, examples()).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))
    model.zero_grad()


def _slopes(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def _curves(net: nn.Module) -> torch.Tensor:
    slopes = _slopes(net).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(slopes, [*net.parameters()], retain_graph=True)])


@both_process_models
@pytest.mark.parametrize("scale", ["MEAN", "SUM"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph_outside_of_run(strategy: td.Strategy, process_model: str, scale: str) -> None:
    """Ranks can differentiate the gradient of all once more: each its own part, as in ``run``."""
    model, reference = built(strategy, small), plain(small)
    strategy.set_gradient_policy(scale=scale)
    mine = strategy.experimental_local_results(strategy.run(replica))[0]  # 0, or the number of the rank
    factor = 1.0 if process_model == "in_process" else 1.5 if scale == "MEAN" else 3.0
    own = 1.0 if process_model == "in_process" else (1 + mine) / 1.5
    for passes in range(2):
        ((1 + mine) * mse(model, examples())).backward(create_graph=True)
        (factor * mse(reference, examples())).backward(create_graph=True)
        torch.testing.assert_close(_slopes(model), _slopes(reference), rtol=1e-11, atol=1e-12)
        if passes == 0:
            torch.testing.assert_close(_curves(model), own * _curves(reference), rtol=1e-9, atol=1e-10)
    for net in (model, reference):
        net.zero_grad()


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), 2.0))


@both_process_models
@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_gradients_that_passed_a_collective_can_be_differentiated(
    strategy: td.Strategy, process_model: str, call: str
) -> None:
    """With y, the sum of w * x, each w has the gradient 4 * y * x of two losses y ** 2; its square is trained."""
    model = built(strategy, _Weight)

    def step() -> None:
        context = td.get_replica_context()
        assert context is not None
        part = model.w * (context.replica_id_in_sync_group + 1.0)
        y = context.all_reduce("SUM", part) if call == "all_reduce" else context.all_gather(part, axis=0).sum()
        (gradient,) = torch.autograd.grad((y**2).sum(), model.w, create_graph=True)
        (gradient**2).sum().backward()

    strategy.run(step)
    assert gradients(strategy, model).tolist() == [[1440.0], [1440.0]]


@both_process_models
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_another_model_concerns_no_other_rank(strategy: td.Strategy, process_model: str) -> None:
    built(strategy, small)
    other = plain(small)
    if strategy.is_chief:
        mse(other, examples()).backward(create_graph=True)
        assert all(p.grad.grad_fn is not None for p in other.parameters())
        other.zero_grad()


@both_process_models
@pytest.mark.parametrize("kind", ["sgd", "sparse_adam"])
def test_sparse_embedding(strategy: td.Strategy, process_model: str, kind: str) -> None:
    def embedding() -> nn.Module:
        return nn.Embedding(20, 3, sparse=True)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [*model.parameters()]
        return torch.optim.SGD(parameters, lr=0.5) if kind == "sgd" else torch.optim.SparseAdam(parameters)

    model, reference = built(strategy, embedding), plain(embedding)
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    rows = torch.tensor([[1, 4, 4, 7], [7, 0, 1, 1]])

    def step(k: int) -> None:
        optimizer.zero_grad()
        model(rows[replica()] + k).pow(2).mean().backward()
        assert model.weight.grad.is_sparse
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        reference(rows + k).pow(2).mean().backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_sparse_embedding_unused_on_one_replica(strategy: td.Strategy, process_model: str) -> None:
    def tables() -> nn.Module:
        return nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)])

    model, reference = built(strategy, tables), plain(tables)
    strategy.run(lambda: model[replica()](torch.tensor([1, 3])).sum().backward())
    for k in range(2):
        (reference[k](torch.tensor([1, 3])).sum() / 2).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@pytest.mark.parametrize(
    "process_model", ["in_process", pytest.param("ranks", marks=pytest.mark.distributed(workers=3))]
)
def test_bfloat16_is_summed_in_float32(process_model: str) -> None:
    """256 + 1 + 1 is 256 when each sum is rounded to the eight digits of bfloat16."""
    devices = ["cpu:0", "cpu:1", "cpu:2"] if process_model == "in_process" else None
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            layer = nn.Linear(1, 1, bias=False).bfloat16()
        strategy.set_gradient_policy(scale="SUM")
        inputs = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)

        def step() -> torch.Tensor:
            layer(inputs[replica()].reshape(1, 1)).sum().backward()
            assert layer.weight.grad.dtype is torch.bfloat16
            return layer.weight.grad.float()

        for value in strategy.experimental_local_results(strategy.run(step)):
            assert value.item() == 258.0


@both_process_models
def test_tied_parameters(strategy: td.Strategy, process_model: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
            self.second.weight = self.first.weight

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(features))).sum(1, keepdim=True)

    model, reference = built(strategy, Tied), plain(Tied)
    assert model.first.weight is model.second.weight
    assert len([*model.parameters()]) == 3
    strategy.run(lambda: mse(model, half()).backward())
    mse(reference, examples()).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_freezing_and_thawing(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.1)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k, wanted in enumerate([True, False, False, True, True]):
        model[0].requires_grad_(wanted)
        reference[0].requires_grad_(wanted)
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
        assert model[0].weight.requires_grad is wanted
        assert (model[0].weight.grad is None) is not wanted
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_frozen_at_birth_and_thawed(strategy: td.Strategy, process_model: str) -> None:
    def frozen() -> nn.Module:
        model = small()
        model[0].requires_grad_(False)
        return model

    model, reference = built(strategy, frozen), plain(frozen)
    for module in (model, reference):
        module.requires_grad_(True)
    strategy.run(lambda: mse(model, half()).backward())
    mse(reference, examples()).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(strategy: td.Strategy, process_model: str, reentrant: bool) -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 1))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = checkpoint(model[1], model[0](batch[0]), use_reentrant=reentrant)
        return ((model[2](hidden).squeeze(1) - batch[1]) ** 2).mean()

    model, reference = built(strategy, deep), plain(deep)
    strategy.run(lambda: loss(model, half()).backward())
    mse(reference, examples()).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_reentrant_checkpoint_of_a_shared_layer(strategy: td.Strategy, process_model: str) -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = checkpoint(model, batch[0], use_reentrant=True)
        return ((model(torch.tanh(hidden)).sum(1) - batch[1]) ** 2).mean()

    def square() -> nn.Module:
        return nn.Linear(10, 10)

    def features(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0].requires_grad_(), batch[1]

    model, reference = built(strategy, square), plain(square)
    strategy.run(lambda: loss(model, features(half())).backward())
    loss(reference, features(examples())).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


class _Scale(torch.autograd.Function):
    """``x * weight`` past ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.head = nn.Linear(10, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = _Scale.apply(features, self.scale)
        return self.head(torch.tanh(hidden + functional.softplus(self.scale)))


@both_process_models
@pytest.mark.parametrize("scale", ["MEAN", "SUM"])
def test_custom_function_with_several_passes(strategy: td.Strategy, process_model: str, scale: str) -> None:
    model, reference = built(strategy, _Scaled), plain(_Scaled)
    strategy.set_gradient_policy(scale=scale)

    def passes() -> None:
        for k in range(3):
            mse(model, half(k)).backward()

    for _ in range(5):  # the replicas' threads share the parameter object: a race shows now and then
        model.zero_grad()
        reference.zero_grad()
        strategy.run(passes)
        ((2.0 if scale == "SUM" else 1.0) * sum(mse(reference, examples(k)) for k in range(3))).backward()
        assert_all_close(gradients(strategy, model), flat_gradients(reference))


@both_process_models
def test_autograd_grad_of_a_custom_function(strategy: td.Strategy, process_model: str) -> None:
    """The part that bypassed ``__torch_function__`` counts too; unused inputs are treated as torch does."""
    model, reference = built(strategy, _Scaled), plain(_Scaled)
    aside = built(strategy, small)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.autograd.grad(mse(model, half()), model.scale)[0]
        loss, unused = mse(model, half()), aside[0].weight
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss, [model.scale, unused], retain_graph=True)
        assert torch.autograd.grad(loss, [unused], retain_graph=True, allow_unused=True) == (None,)
        zeros = torch.autograd.grad(loss, [unused], materialize_grads=True)[0]
        assert torch.equal(zeros, torch.zeros(4, 10, dtype=torch.float64))
        return found, torch.tensor(replica())

    found, number = strategy.run(step)
    for value, part in zip(*map(strategy.experimental_local_results, (found, number)), strict=True):
        batch = tuple(values.chunk(2)[int(part)] for values in examples())
        expected = torch.autograd.grad(mse(reference, batch), reference.scale)[0]
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    assert torch.isnan(gradients(strategy, model)).all()
