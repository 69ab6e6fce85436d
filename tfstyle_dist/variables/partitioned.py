"""A parameter that is divided over workers, to whoever copies values and sums gradients: this worker's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core.untraced import untraced


class LocalPart:
    """This worker's part of a divided parameter; acts as a plain parameter where values and gradients are moved.

    Between replicas only the same parts are exchanged, so nobody there needs to know that there are others.

    Args:
        parameter: the DTensor.
    """

    def __init__(self, parameter: Any) -> None:
        self.whole = parameter
        self.part = mesh.part_of(parameter)

    def __getattr__(self, name: str) -> Any:
        """Whatever asks for shape, type or place means the part."""
        return getattr(self.part, name)

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Functions of torch get the part."""
        plain = [a.part if isinstance(a, LocalPart) else a for a in args]
        return func(*plain, **(kwargs or {}))

    def part_like(self, value: Any) -> torch.Tensor:
        """This worker's part of a value that is divided in any way, cut as this one. Collective where that differs."""
        return mesh.part_of(mesh.divided_as(value, self.whole))

    @property
    def grad(self) -> torch.Tensor | None:
        """The part of the gradient that belongs to this part."""
        grad = self.whole.grad
        if grad is None:
            return None
        placed = mesh.divided_as(grad, self.whole)
        if placed is not grad:
            self.whole.grad = placed
        return mesh.part_of(placed)

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        self.whole.grad = None if part is None else mesh.from_part(part, self.whole)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are taken."""
        return bool(self.whole.requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> LocalPart:
        """Says whether gradients are taken."""
        self.whole.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """A hook of the parameter."""
        return self.whole.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """A hook of the parameter."""
        return self.whole.register_post_accumulate_grad_hook(hook)
