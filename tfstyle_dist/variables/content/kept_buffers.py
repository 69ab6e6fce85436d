"""What stays of the replicas' attributes when their strategy is closed or gone: the buffers, which checkpoints read.

All else the replicas had for themselves, and nobody could see it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.content.object_content import ObjectContent


class _BuffersOf:
    """Stands for a module, and has its buffers alone as attributes."""

    __slots__ = ("_module",)

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {torch_internals.BUFFERS: torch_internals.buffers_of(self._module)}


def keep_buffers(
    objects: Sequence[tuple[Any, ObjectContent]], places: dict[int, Any], shown: int
) -> list[ObjectContent]:
    """Clears the contents of objects, and gives modules contents of their buffers alone, as they were marked.

    Args:
        objects: with their contents.
        places: where the contents are found by the objects' ``id``; only those of modules are found afterwards.
        shown: the replica whose attributes the objects have themselves.

    Returns:
        The contents of the modules.
    """
    kept = []
    for thing, content in objects:
        places.pop(id(thing), None)
        if isinstance(thing, torch.nn.Module):
            buffers = content.alone(torch_internals.BUFFERS, _refer_to_buffers(content.reference))
            buffers.dicts[shown] = {}
            kept.append(buffers)
            places[id(thing)] = buffers
        content.clear()
    return kept


def _refer_to_buffers(module: Callable[[], Any]) -> Callable[[], _BuffersOf | None]:
    def refer() -> _BuffersOf | None:
        thing = module()
        return None if thing is None else _BuffersOf(thing)

    return refer
