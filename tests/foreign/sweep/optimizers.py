"""How an optimizer that somebody else wrote trains a small model, in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from programs import Program, Run
from torch import nn
from torch.nn import functional as F

OF_THE_REPLICA = (
    "calls torch.autograd.grad in its step, so each replica has estimates of its own and the replicas drift apart"
)
ROUNDING = (
    "eigenvectors of equal eigenvalues depend on the rounding of the gradient, so the sum of two halves gives others"
)
Made = Callable[[nn.Module], Any]


class Normed(nn.Module):
    """Matrices, vectors and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.n(self.a(x))))


class Matrices(nn.Module):
    """What optimizers of matrices take."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16, bias=False), nn.Linear(16, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def trained(make: Made, kind: type[nn.Module] = Normed, how: str = "plain", ends: bool = False) -> Program:
    """A program of one optimizer.

    Args:
        make: makes it for a model.
        kind: of the model.
        how: "plain", "closure", "two steps" (SAM), "graph" (``create_graph=True``), "loss" (a closure that returns a
            number), "fused" (``fused_backward``).
        ends: whether ``eval()`` is called on it at the end.
    """

    def program(run: Run) -> Any:
        with run.scope():
            model = kind()
            optimizer = make(model)
            if hasattr(optimizer, "train"):
                optimizer.train()

        def loss(i: int) -> torch.Tensor:
            x, y = run.xy(i)
            return F.mse_loss(model(x), y)

        def closure(i: int) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(i)
            value.backward()
            return value

        def step(i: int) -> None:
            optimizer.zero_grad()
            if how == "closure":
                optimizer.step(lambda: closure(i))
                return
            if how == "fused":
                optimizer.fused_backward(loss(i), lr=1e-3)
                return
            value = loss(i)
            value.backward(create_graph=how == "graph")
            if how == "two steps":
                optimizer.first_step(zero_grad=True)
                loss(i).backward()
                optimizer.second_step(zero_grad=True)
            elif how == "loss":
                mean = float(run.mean(value.detach()))  # the step depends on it, so it must be that of all replicas
                optimizer.step(lambda: mean)
            else:
                optimizer.step()

        torch.manual_seed(0)  # on every rank: what an optimizer draws is the same on all
        run.go(step)
        if ends:
            optimizer.eval()
        return run.result(model)

    return program


def of(kind: Any) -> Made:
    """Makes an optimizer in the first way that it takes."""

    def make(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        ways = (
            lambda: kind(model.parameters(), lr=1e-3),
            lambda: kind(model.parameters()),
            lambda: kind(
                [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr=1e-3
            ),
            lambda: kind(model.parameters(), num_iterations=6),
            lambda: kind(model),
            lambda: kind(model, lr=1e-3),
        )  # fmt: skip
        errors = []
        for way in ways:
            try:
                return way()
            except Exception as error:
                errors.append(error)
        raise errors[0]

    return make
