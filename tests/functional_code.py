"""Functional code of other people: ``torch.func``, ``torch.autograd.Function``, leaves of the program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import func, nn
from torch.autograd import forward_ad, functional

X = torch.arange(3.0)


class Scaled(torch.autograd.Function):
    """A function of somebody else, which gives its second argument a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)


def energy(weight: torch.Tensor) -> torch.Tensor:
    return ((weight * X.to(place(weight))) ** 2).sum()


def place(weight: Any) -> torch.device:
    """Where a program computes with it; a variable on a server has the name of the server as its device."""
    return weight.device if isinstance(weight.device, torch.device) else torch.device("cpu")


def dual(weight: Any) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent = torch.ones(3, device=place(weight))
        return forward_ad.unpack_dual(energy(forward_ad.make_dual(weight, tangent))).tangent


def leaf(weight: Any) -> torch.Tensor:
    own = weight.detach().requires_grad_()
    energy(own).backward()
    return own.grad


WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": func.grad(energy),
    "grad of a dict": lambda w: func.grad(lambda given: energy(given["w"]))({"w": w})["w"],
    "vmap": func.vmap(lambda part: part * 2),
    "vmap around a read": lambda w: func.vmap(lambda row: (row * w).sum())(torch.eye(3, device=place(w))),
    "jvp": lambda w: func.jvp(energy, (w,), (torch.ones(3, device=place(w)),))[1],
    "vjp": lambda w: func.vjp(energy, w)[1](torch.ones((), device=place(w)))[0],
    "jacrev": func.jacrev(energy),
    "jacfwd": func.jacfwd(energy),
    "hessian": func.hessian(energy),
    "dual": dual,
    "jacobian": lambda w: functional.jacobian(energy, w),
    "hvp": lambda w: functional.hvp(energy, w, torch.ones(3, device=w.detach().device))[1],
    "leaf": leaf,
    "grad of a leaf": lambda w: torch.autograd.grad(energy(own := w.detach().requires_grad_()), own)[0],
    "function": lambda w: Scaled.apply(torch.ones(3, device=place(w)), w),
}
