"""How a model that somebody else wrote is trained: 6 steps of SGD, in every form; and what may depend on the replica.

Weights are compared, buffers too, and the keys of ``state_dict``. With ``shares=True`` the reference is one device that
does each replica's share by itself, with buffers and random numbers of its own, as replicas do: batch statistics and
dropout are then part of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from programs import SEED, STEPS, Each, Program, Run, add, flat
from torch import nn, optim

FORMS = ("replicas", "ranks")
MORE = ("replicas", "ranks", "central", "grouped", "servers")


@dataclass(frozen=True)
class Recipe:
    """A model and what it learns.

    Attributes:
        build: makes it.
        batch: the whole batch of a step, from its number: tensors, lists of examples, or dicts and tuples of these.
        loss: of the model and a share of the batch.
        rate: of SGD.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    rate: float = 0.05


def mean_square(found: Any) -> torch.Tensor:
    """A loss for whatever a model returns: the mean square of every floating tensor in it that has a gradient."""
    return sum((t.pow(2).mean() for t in _trained(found)), torch.zeros(()))


def _trained(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        if found.requires_grad:
            yield found.abs() if found.is_complex() else found
    elif isinstance(found, dict) or hasattr(found, "keys"):
        for value in dict(found).values():
            yield from _trained(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _trained(value)


def _devices() -> list[Any]:
    """Torch's modules for what has random numbers of its own: the CPU, and the default device."""
    kind = torch.get_default_device().type
    return [torch] if kind == "cpu" else [torch, torch.get_device_module(kind)]


def _random_state() -> list[torch.Tensor]:
    return [module.get_rng_state() for module in _devices()]


def _set_random_state(states: list[torch.Tensor]) -> None:
    for module, state in zip(_devices(), states, strict=True):
        module.set_rng_state(state)


class _Shares:
    """One device's buffers and random numbers for each of the replicas that it stands for."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self._model = model
        self._buffers = [[b.clone() for b in model.buffers()] for _ in range(count)]
        self._random = []
        for share in range(count):
            torch.manual_seed(SEED + share)
            self._random.append(_random_state())

    def __iter__(self) -> Iterator[int]:
        for share, kept in enumerate(self._buffers):
            self._load(kept)
            _set_random_state(self._random[share])
            yield share
            self._random[share] = _random_state()
            self._buffers[share] = [b.clone() for b in self._model.buffers()]
        self._load(self._buffers[0])

    def buffers(self) -> list[torch.Tensor]:
        """Those of every share."""
        return [flat(kept) for kept in self._buffers]

    def _load(self, kept: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), kept, strict=True):
                buffer.copy_(value)


def trained(recipe: Recipe, shares: bool) -> Program:
    """The program of a recipe."""

    def program(run: Run) -> Any:
        with run.scope():
            model = recipe.build().to(torch.get_default_dtype()).train()
            optimizer = optim.SGD(model.parameters(), lr=recipe.rate)
        before = flat(list(model.parameters()))
        if run.strategy is not None and shares:
            run.strategy.seed_replicas(SEED)
        states = _Shares(model, run.shares) if run.strategy is None and shares else None

        def step(i: int) -> None:
            optimizer.zero_grad()
            whole = recipe.batch(i)
            if states is None:
                recipe.loss(model, run.share(whole)).backward()
            else:
                for share in states:
                    part = Run("one")
                    part.replicas, part.replica = run.shares, lambda share=share: share
                    (recipe.loss(model, part.share(whole)) / run.shares).backward()
            optimizer.step()

        run.go(step, STEPS)
        weights = flat(list(model.parameters()))
        if not weights.isfinite().all():
            raise AssertionError("the weights are not finite")
        if run.form == "one" and (weights - before).abs().max() < 1e-6:
            raise AssertionError("nothing was trained")
        own = Each(states.buffers()) if states else run.each(lambda: list(model.buffers()))
        each = run.each(lambda: list(model.parameters()))
        return {"weights": weights, "keys": " ".join(model.state_dict()), "each": each, "buffers": own}

    return program


def model(
    group: str, name: str, recipe: Recipe, shares: bool = False, forms: tuple[str, ...] = FORMS, **more: Any
) -> None:
    """Puts a model into the table."""
    reference = "shares" if shares else "one"
    forms = tuple(f for f in forms if not (shares and f == "servers"))
    add(group, name, trained(recipe, shares), forms=forms, dtype=more.pop("dtype", "auto"), reference=reference, **more)
