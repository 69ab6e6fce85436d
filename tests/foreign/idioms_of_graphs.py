"""More training steps as other people write them: see ``idioms``."""

from __future__ import annotations

import torch
from idioms import Net, Step, case, sgd, usual
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ---- modules that are made in unusual ways ------------------------------------------------------------------------


@case
def encoder_of_copied_layers() -> tuple[nn.Module, Step]:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), encoder, nn.Flatten(), nn.Linear(6, 3))
    return usual(model)


@case
def lazy_layers() -> tuple[nn.Module, Step]:
    return usual(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)))


@case
def parametrized() -> tuple[nn.Module, Step]:
    first = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
    second = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
    return usual(nn.Sequential(first, second))


@case
def conversions_that_do_nothing() -> tuple[nn.Module, Step]:
    model = Net()
    model.first.weight = model.first.weight.to("cpu")
    model.second.bias = model.second.bias.contiguous()
    return usual(model)


@case
def values_by_set_and_data() -> tuple[nn.Module, Step]:
    model = Net()
    with torch.no_grad():
        model.first.weight.set_(torch.linspace(-1, 1, 96, dtype=model.first.weight.dtype).view(16, 6))
    model.second.weight.data.fill_(0.1)
    return usual(model)


@case
def tied_frozen_complex_and_laid_out_otherwise() -> tuple[nn.Module, Step]:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.turned = nn.Parameter(torch.randn(3, 6).t())
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.frozen(self.two(torch.tanh(self.one(x))))
            return (hidden * self.phase).abs() @ self.turned

    return usual(Odd())


@case
def rows_of_a_bounded_embedding() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3))
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model((x.abs() * 4).long().clamp(max=9)), y).backward()
        optimizer.step()

    return model, step


# ---- hooks, transforms, recomputation -----------------------------------------------------------------------------


@case
def hooks_from_outside() -> tuple[nn.Module, Step]:
    model = Net()
    model.first.weight.register_hook(lambda g: 2 * g)
    model.second.register_forward_hook(lambda module, given, made: 1.5 * made)
    return usual(model)


@case
def hooks_from_inside() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        calls: list[int] = []
        one = model.first.register_forward_hook(lambda module, given, made: calls.append(1))
        two = model.first.weight.register_hook(lambda g: 2 * g)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        one.remove()
        two.remove()
        optimizer.step()
        assert calls == [1]

    return model, step


@case
def functional_transforms() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        values = {name: p.detach() for name, p in model.named_parameters()}
        found = grad(lambda v: F.mse_loss(functional_call(model, v, (x,)), y))(values)
        optimizer.zero_grad()
        loss = F.mse_loss(functional_call(model, dict(model.named_parameters()), (x,)), y)
        (loss + 0 * sum(g.sum() for g in found.values())).backward()
        optimizer.step()

    return model, step


@case
def recomputation() -> tuple[nn.Module, Step]:
    class Recomputing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            hidden = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=True)
            return checkpoint(self.second, hidden, use_reentrant=False)

    return usual(Recomputing())


@case
def two_passes_over_one_graph() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()

    return model, step


@case
def adversaries() -> tuple[nn.Module, Step]:
    maker, judge = nn.Linear(3, 6), Net()
    for_maker, for_judge = sgd(maker), sgd(judge)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for_judge.zero_grad()
        (judge(x) - judge(maker(y).detach())).pow(2).mean().backward()
        for_judge.step()
        for_maker.zero_grad()
        F.mse_loss(judge(maker(y)), y).backward()
        for_maker.step()

    return nn.ModuleList([maker, judge]), step


@case
def an_error_that_is_caught() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer = sgd(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        try:
            model(x[:, :2])
        except RuntimeError:
            optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return model, step
