"""Public names of a package that are loaded on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_HINT = (
    ": it has what distributes the work. Tensors, layers, losses, optimizers, gradients and datasets are those of "
    "PyTorch (docs/migrating.md)"
)


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: for each public name the module below the package that defines it, or the module itself that it names.
    """

    def load(name: str) -> Any:
        if name not in homes:
            said = f"module {package!r} has no attribute {name!r}"
            hint = "" if name.startswith("_") else _HINT
            raise AttributeError(said + hint, name=name, obj=sys.modules[package])
        module = import_module(f"{package}.{homes[name]}")
        found = module if homes[name].rpartition(".")[2] == name else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    return load
