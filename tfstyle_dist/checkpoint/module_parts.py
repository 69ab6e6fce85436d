"""Parts that a module gets after it was restored: parameters, buffers and modules take their saved state then."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from tfstyle_dist.checkpoint import codec
from tfstyle_dist.checkpoint.leaves import Leaf, ModuleLeaf, TensorLeaf
from tfstyle_dist.checkpoint.restored import Restored
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.process_hooks import Hooks


class _Rest:
    """What a checkpoint has of a module beyond the parts that it had when it was restored."""

    def __init__(self, restored: Restored, leaf: ModuleLeaf) -> None:
        self._restored, self._path = restored, leaf.path
        self.left: dict[str, Any] = restored.objects[leaf.path]["tree"]
        self._note()
        self.stop = weakref.finalize(leaf.target, _hooks.uninstall)
        _hooks.install()

    def _note(self) -> None:
        used = self._restored.found[self._path].used
        self.left = {key: tree for key, tree in self.left.items() if not used.issuperset(codec.tensor_names(tree))}

    def wants(self, name: str) -> bool:
        return any(f".{name}." in f".{key}." for key in self.left)

    def give(self, key: str, part: torch.nn.Module | torch.Tensor) -> None:
        leaf: Leaf
        if isinstance(part, torch.nn.Module):
            leaf = ModuleLeaf(f"{self._path}/{key}", part)
            inside = len(key) + 1
            tree: Any = {name[inside:]: entry for name, entry in self.left.items() if name.startswith(f"{key}.")}
        else:
            leaf, tree = TensorLeaf(f"{self._path}/{key}", part), self.left.get(key)
        if not tree:
            return
        found, read = leaf.match(tree, self._restored.reader.content["tensors"]), self._restored.reading()
        if found.problems:
            raise InvalidArgumentError("the objects do not fit: " + "; ".join(found.problems) + ".")
        leaf.load(tree, read)
        read.servers.run()
        match = self._restored.found[self._path]
        match.used |= found.used
        match.missing += found.missing
        self._note()


_rests: weakref.WeakKeyDictionary[torch.nn.Module, _Rest] = weakref.WeakKeyDictionary()


def watch(restored: Restored, leaves: Sequence[Leaf]) -> None:
    """Gives modules that have taken their state the rest of it when they get the parts for it.

    Args:
        restored: the checkpoint, which counts from now on.
        leaves: the modules, among others.
    """
    for leaf in leaves:
        if isinstance(leaf, ModuleLeaf):
            if (before := _rests.pop(leaf.target, None)) is not None:
                before.stop()
            if leaf.path in restored.found and not leaf.takes_itself:
                rest = _Rest(restored, leaf)
                if rest.left:
                    _rests[leaf.target] = rest
                else:
                    rest.stop()


def _came(module: torch.nn.Module, name: str, part: Any) -> None:
    for root, rest in list(_rests.items()):
        if part is None or not rest.wants(name):
            continue
        prefix = next((prefix for prefix, inner in root.named_modules() if inner is module), None)
        if prefix is not None:
            rest.give(f"{prefix}.{name}" if prefix else name, part)


_hooks = Hooks(
    lambda: torch_module.register_module_parameter_registration_hook(_came),
    lambda: torch_module.register_module_buffer_registration_hook(_came),
    lambda: torch_module.register_module_module_registration_hook(_came),
)
