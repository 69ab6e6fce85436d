"""Models and optimizers of random programs that keep what they know in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

FEATURES, TARGETS = 6, 3


class Spectral(nn.Module):
    """Complex filters over the memory of real parameters, conjugates, and parameters in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ParameterList(torch.randn(4, 2) for _ in range(2))
        self.more = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4)), "mix": torch.randn(4, TARGETS) / 2})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        found = sum((spectrum * torch.view_as_complex(each)).conj() * spectrum for each in self.filters)
        return (found.real * self.more["scale"]) @ self.more["mix"]


class Cubed(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return 3 * x**2 * gradient


class Recomputed(nn.Module):
    """Computes its middle once more in the backward pass, and calls its last layer with weights that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.middle, self.first(x), use_reentrant=False)
        made = {name: value * 0.5 for name, value in self.last.named_parameters()}
        return torch.func.functional_call(self.last, made, (Cubed.apply(hidden),))


class Scaled(optim.Optimizer):
    """Momentum in a list of its own, a norm over all gradients that it remembers, and counts in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "steps": 0, "mean": None})
        self.norms: list[torch.Tensor] = []
        self.momentum: dict[int, torch.Tensor] = {}
        self.largest = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """See the base class."""
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not found:
            return
        norm = torch.stack([p.grad.abs().square().sum() for p in found]).sum().sqrt()  # type: ignore[union-attr]
        self.norms = [*self.norms[-2:], norm]
        self.largest = max(self.largest, float(norm))
        place = 0
        for group in self.param_groups:
            group["steps"] += 1
            group["mean"] = norm if group["mean"] is None else 0.5 * (group["mean"] + norm)
            for p in group["params"]:
                place += 1
                if p.grad is None:
                    continue
                if place not in self.momentum or self.momentum[place].shape != p.shape:
                    self.momentum[place] = torch.zeros_like(p)
                self.momentum[place].mul_(0.5).add_(p.grad / (1 + norm))
                p.add_(self.momentum[place], alpha=-group["lr"] / group["steps"] ** 0.5)


class Lookahead(optim.Adam):
    """Adam with slow copies of the weights that it goes back to every second step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.02)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """See the base class."""
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in found]
        super().step()
        self.count += 1
        for p, old in zip(found, before, strict=True):
            slow = self.state[p].setdefault("slow", old)
            if self.count % 2 == 0 and slow.shape == p.shape:
                slow.lerp_(p, 0.5)
                p.copy_(slow)


MODELS: dict[str, Callable[[], nn.Module]] = {"spectral": Spectral, "recomputed": Recomputed}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "scaled": Scaled,
    "lookahead": Lookahead,
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05),
}
