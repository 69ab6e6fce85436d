"""The private names of ``torch.func`` that are used: what each must do."""

from __future__ import annotations

from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.process_hooks import Patch


def test_what_torch_func_wraps() -> None:
    assert not torch_internals.transforms_are_active()
    seen: list[tuple[str, bool]] = []

    def saw(name: str) -> Any:
        def wrapper(original: Any, tensor: torch.Tensor, *args: Any) -> Any:
            seen.append((name, tensor is values))
            return original(tensor, *args)

        return wrapper

    patches = [
        Patch(getattr(torch_internals.func, module), name, saw(module))
        for module, name in torch_internals.FUNC_WRAPS.items()
    ]
    values = torch.ones(2)
    for patch in patches:
        patch.install()
    try:
        torch.func.grad(lambda v: v.sum())(values)
        torch.func.vmap(lambda v: v * 2)(values)
    finally:
        for patch in patches:
            patch.uninstall()
    assert seen == [("eager_transforms", True), ("vmap", True)]

    def inside(v: torch.Tensor) -> torch.Tensor:
        assert torch_internals.transforms_are_active()
        with torch_internals.outside_of_transforms():
            assert not torch_internals.transforms_are_active()
            leaf = torch.ones(2).requires_grad_()
        return (v * leaf).sum()

    assert torch.func.grad(inside)(values).tolist() == [1, 1]
