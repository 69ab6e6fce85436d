"""Steps over classes as libraries beside torch have them: optimizers, containers and modules of their own kind."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from idioms import Net, Step, case, usual
from torch import nn
from torch.nn import functional as F


class ListOf:
    """A list that is none, such as fastcore's ``L``."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class OwnOptimizer:
    """One that is no ``torch.optim.Optimizer``, as those of fastai: what it keeps is in a dict by parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        self.param_lists = ListOf([ListOf(parameters)])
        self.hypers = ListOf([{"lr": lr}])
        self.state: dict[Any, dict[str, Any]] = collections.defaultdict(dict)

    def step(self) -> None:
        for parameters, hyper in zip(self.param_lists, self.hypers, strict=True):
            for p in parameters:
                state = self.state[p]
                state["mean"] = p.grad if "mean" not in state else 0.9 * state["mean"] + p.grad
                state["count"] = state.get("count", 0) + 1
                p.data.sub_(state["mean"], alpha=hyper["lr"] / state["count"])

    def zero_grad(self) -> None:
        for parameters in self.param_lists:
            for p in parameters:
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "hypers": self.hypers}


class OwnLookahead(OwnOptimizer):
    """One around another, both of the library's own class."""

    def __init__(self, optimizer: OwnOptimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.slow: list[torch.Tensor] | None = None

    def step(self) -> None:
        parameters = [p for group in self.optimizer.param_lists for p in group]
        if self.slow is None:
            self.slow = [p.detach().clone() for p in parameters]
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, parameters, strict=True):
                slow.lerp_(p.data, 0.5)
                p.data.copy_(slow)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@case
def optimizer_of_a_class_of_its_own() -> tuple[nn.Module, Step]:
    model = Net()
    return usual(model, OwnOptimizer(model.parameters()))


@case
def optimizer_of_a_class_of_its_own_around_another() -> tuple[nn.Module, Step]:
    model = Net()
    return usual(model, OwnLookahead(OwnOptimizer(model.parameters())))


class Tree(MutableMapping):  # type: ignore[type-arg]
    """Tensors by name, and others of this kind, as tensordict has them; it has no truth, and cannot be compared."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        raise RuntimeError("a tree is neither true nor false")

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("a tree cannot be compared")

    __hash__ = object.__hash__


class TreeUpdater:
    """Moves tensors towards others; it finds both in trees of trees."""

    def __init__(self, targets: Tree, sources: Tree) -> None:
        self.targets, self.sources = targets, sources

    def step(self) -> None:
        _move(self.targets, self.sources)


def _move(targets: Tree, sources: Tree) -> None:
    for name in sources:
        if isinstance(sources[name], Tree):
            _move(targets[name], sources[name])
        else:
            targets[name].data.lerp_(sources[name].data, 0.3)


def _tree_of(module: nn.Module, value: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    children = {name: _tree_of(child, value) for name, child in module.named_children()}
    return Tree({n: value(p) for n, p in module.named_parameters(recurse=False)} | children)


class _Target(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, value in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), value.detach().clone())


@case
def target_in_trees_of_trees() -> tuple[nn.Module, Step]:
    model = nn.ModuleDict({"net": Net()})
    target = _Target(model)
    by_memory = {p.data_ptr(): b for p, b in zip(model.parameters(), target.buffers(), strict=True)}
    trees = (
        Tree({"all": _tree_of(model, lambda p: p)}),
        Tree({"all": _tree_of(model, lambda p: by_memory[p.data_ptr()])}),
    )
    updater = TreeUpdater(trees[1], trees[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        goal = x @ target.net_first_weight.t() @ target.net_second_weight.t()
        F.mse_loss(model["net"](x), y + goal).backward()
        optimizer.step()
        updater.step()

    return nn.ModuleList([model, target]), step


class _Counts(nn.Module):
    """A module whose hash is that of its values, as in torchmetrics; while it is made it has no other attributes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Identity()
        self.register_buffer("seen", torch.zeros(()))

    def __hash__(self) -> int:
        return hash((id(self), float(self.seen)))

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("cannot be compared")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not self.__dict__.get("_modules"):
            raise LookupError("it has not been made whole yet")
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x * (self.scale + 0.1 * self.seen)


@case
def module_whose_hash_changes() -> tuple[nn.Module, Step]:
    return usual(nn.Sequential(Net(), _Counts(), nn.Linear(3, 3)))


class _Holder:
    """It keeps a list that holds itself, beside the mean of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.itself: list[Any] = []
        self.itself.append(self.itself)
        self.mean = ListOf([ListOf([p.detach().clone() for p in model.parameters()])])

    def update(self, model: nn.Module) -> None:
        for means in self.mean:
            for mean, p in zip(means, model.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.5)


@case
def mean_in_a_list_of_lists() -> tuple[nn.Module, Step]:
    model, slow = Net(), Net().requires_grad_(False)
    holder, optimizer = _Holder(model), torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        holder.update(model)
        for means in holder.mean:
            for p, mean in zip(slow.parameters(), means, strict=True):
                p.data.copy_(mean)

    return nn.ModuleList([model, slow]), step
