"""All values that a program has, and how those of two programs differ."""

from __future__ import annotations

import collections
import math
from typing import Any

import torch
from objects import Counting, Program, Recurrent
from torch import nn

TOLERANCE = 1e-6
"""Relative to the largest value of a tensor: the package adds in another order than the oracle."""
IN_DOUBLE = 1e-12
"""The same for programs in double precision."""
SMALLEST = 1e-3
"""What smaller values count as."""

SHARING = "flat", "flat_gradient", "aliases", "kept_gradient", "kept_state", "buffer_part"
"""What the operations in ``shared_memory`` keep."""

Snapshot = dict[str, torch.Tensor | float | str]


def _add(name: str, value: Any, found: Snapshot) -> None:
    if isinstance(value, nn.parameter.UninitializedTensorMixin):
        return
    if isinstance(value, torch.Tensor):
        found[name] = value.detach().clone()
    elif isinstance(value, bool | int | float):
        found[name] = float(value)
    elif value is None or isinstance(value, str):
        found[name] = str(value)
    elif isinstance(value, nn.Module):
        _add(name, dict(value.state_dict()), found)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _add(f"{name}.{key}", inner, found)
    elif isinstance(value, list | tuple | collections.deque):
        found[f"{name}.len"] = float(len(value))
        for place, inner in enumerate(value):
            _add(f"{name}.{place}", inner, found)


def snapshot(program: Program) -> Snapshot:
    """Copies of all values of a program, by what they are.

    Args:
        program: of a replica, when it is that replica's turn.
    """
    model, helper = program.model, getattr(program, "helper", None)
    found: Snapshot = {}
    _add("model", model, found)
    for name, parameter in model.named_parameters():
        _add(f"gradient of {name}", parameter.grad, found)
        _add(f"{name} requires gradients", parameter.requires_grad, found)
        _add(f"tag of {name}", getattr(parameter, "tag", None), found)
    _add("training", model.training, found)
    _add("optimizer", program.optimizer.state_dict(), found)
    if program.scheduler is not None:
        state = program.scheduler.state_dict()
        _add("scheduler", {key: value for key, value in state.items() if not key.startswith("_sched")}, found)
    for name in ("count", "log", "buffer", "best", "saved", "teacher", "extra", "average"):
        _add(name, getattr(program, name), found)
    for name in ("lazy", "mods", "momentum", "view", "passing", *SHARING):
        _add(name, getattr(program, name, None), found)
    if hasattr(program, "second"):
        _add("second", program.second.state_dict(), found)
    if helper is not None:
        _add("helper.layer", helper.layer, found)
        _add("helper.optimizer", helper.optimizer.state_dict(), found)
        _add("helper.seen", helper.seen, found)
        _add("helper.flag", getattr(helper, "flag", None), found)
    _add("generator", program.generator.get_state(), found)
    if isinstance(model, Counting):
        for name in ("calls", "history", "last", "ema", "info"):
            _add(f"model.{name}", getattr(model, name), found)
    if isinstance(model, Recurrent):
        _add("model.state", model.state, found)
    return found


def _tensors_differ(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> str | None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    expected, found = expected.cpu(), found.cpu()  # a replica on another device has what the first one has
    if torch.equal(expected, found):
        return None
    same = (expected == found) | ((expected != expected) & (found != found))
    one, other = expected.double(), found.double()
    apart = (one - other).abs().masked_fill(same, 0.0).max().item()
    finite = one[one.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return None if apart <= tolerance * max(largest, SMALLEST) else f"differs by {apart:.3g} of {largest:.3g}"


def _values_differ(expected: Any, found: Any, tolerance: float) -> str | None:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return _tensors_differ(expected, found, tolerance)
    if isinstance(expected, float) and isinstance(found, float):
        bound = tolerance * max(abs(expected), SMALLEST)
        same = expected == found or abs(expected - found) <= bound or (math.isnan(expected) and math.isnan(found))
    else:
        same = type(expected) is type(found) and expected == found
    return None if same else f"{found!r}, expected {expected!r}"


def first_difference(expected: Snapshot, found: Snapshot, tolerance: float = TOLERANCE) -> str | None:
    """What differs first, or ``None``.

    Args:
        expected: the oracle's.
        found: the package's.
        tolerance: relative to the largest value of a tensor.
    """
    if list(expected) != list(found):
        missing, more = [*(expected.keys() - found.keys())], [*(found.keys() - expected.keys())]
        return f"other values are there: missing {sorted(missing)[:5]}, more {sorted(more)[:5]}"
    for name, value in expected.items():
        if (text := _values_differ(value, found[name], tolerance)) is not None:
            return f"{name}: {text}"
    return None
