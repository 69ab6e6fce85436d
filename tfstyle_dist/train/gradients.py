"""``tf.gradients``: derivatives, and the variables a loss depends on."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.gradients.by_examples import leaves_of
from tfstyle_dist.ops import aggregate_columns
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.read_without_graph import say_without_gradient
from tfstyle_dist.variables.record import raw
from tfstyle_dist.variables.replicated import Replicated


class UnconnectedGradients(enum.Enum):
    """What the gradient of something unconnected is (``tf.UnconnectedGradients``): ``None`` or zeros."""

    NONE = "none"
    ZERO = "zero"


def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    name: str = "gradients",
    aggregation_method: int | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
) -> list[torch.Tensor | None]:
    """The derivatives of ``sum(ys)`` with respect to each of ``xs``, local to the calling replica.

    Args:
        ys: a tensor or list of tensors.
        xs: a tensor, parameter or variable, or a list of them.
        grad_ys: weights of the entries of ``ys``, of their shapes; ``None`` means ones.
        name: accepted for TF's signature.
        aggregation_method: how the parts that come from several ``ys`` are summed, an ``AggregationMethod``.
        stop_gradients: a tensor or list of tensors not to differentiate through: they count as constants, all of them
            at once, while the derivatives with respect to them are still found. Unlike ``detach()`` this leaves the
            graph as it is.
        unconnected_gradients: ``"none"`` gives ``None`` where ``ys`` do not depend on an ``x``, ``"zero"`` zeros.

    Returns:
        One entry for each of ``xs``.

    Raises:
        ValueError: ``grad_ys`` has another length than ``ys``, or an unknown method.
        TypeError: ``ys``, ``xs`` or ``stop_gradients`` hold something else than tensors.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> gradients(x * x, x)
        [tensor(6.)]

    Source: ``tf.gradients``.
    """
    method = AggregationMethod.validate(aggregation_method)
    known = [member.value for member in UnconnectedGradients]
    if not isinstance(unconnected_gradients, UnconnectedGradients) and unconnected_gradients not in known:
        raise ValueError(f"unconnected_gradients must be one of {known}, got {unconnected_gradients!r}.")
    unconnected = UnconnectedGradients(unconnected_gradients)
    outputs, inputs = _as_list(ys), _as_list(xs)
    for y in outputs:
        if not isinstance(y, torch.Tensor):
            raise TypeError(
                f"gradients: ys must be tensors that were computed from xs, got {y!r} ({type(y).__name__}). Give the "
                "loss itself, not loss.item()."
            )
    weights = [None] * len(outputs) if grad_ys is None else _as_list(grad_ys)
    if len(weights) != len(outputs):
        raise ValueError(
            f"Passed {len(weights)} grad_ys for {len(outputs)} ys; grad_ys needs one entry (or None) for each y."
        )
    outputs = [y._tfstyle_value() if isinstance(y, Replicated) else y for y in outputs]
    seeds = [
        torch.ones_like(y) if w is None else torch.as_tensor(w, dtype=y.dtype)
        for y, w in zip(outputs, weights, strict=True)
    ]
    with _stopped([] if stop_gradients is None else _as_list(stop_gradients)):
        if len(outputs) > 1 and method != AggregationMethod.DEFAULT:
            parts = [_grad([y], inputs, [w], keep=True) for y, w in zip(outputs, seeds, strict=True)]
            found = aggregate_columns([[p[i] for p in parts] for i in range(len(inputs))], method)
        else:
            found = _grad(outputs, inputs, seeds, keep=True)
    say_without_gradient((find_record(x), gradient) for x, gradient in zip(inputs, found, strict=True))
    if unconnected is UnconnectedGradients.ZERO:
        return [torch.zeros_like(_leaf(x)) if g is None else g for g, x in zip(found, inputs, strict=True)]
    return found


@contextmanager
def _stopped(tensors: Sequence[Any]) -> Iterator[None]:
    """Inside, what arrives at these tensors is found, and goes no further.

    A hook of the operation that made a tensor runs after the engine has noted what arrived. Leaves have nothing behind
    them.
    """
    places: dict[Any, set[int]] = {}
    for tensor in tensors:
        leaf = _leaf(tensor)
        with raw():
            if leaf.grad_fn is not None:
                places.setdefault(leaf.grad_fn, set()).add(leaf.output_nr)
    handles = [node.register_prehook(_dropping(stopped)) for node, stopped in places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _dropping(stopped: set[int]) -> Callable[[Any], Any]:
    return lambda grads: tuple(None if place in stopped else grad for place, grad in enumerate(grads))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _leaf(x: Any) -> torch.Tensor:
    """The tensor of the graph that stands for ``x``: of a variable the replica's copy."""
    if isinstance(x, Replicated):
        return x._tfstyle_leaf()
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"gradients: xs and stop_gradients must be tensors or variables, got a {type(x).__name__}.")
    return x


def _grad(
    ys: Sequence[torch.Tensor], xs: Sequence[Any], weights: Sequence[torch.Tensor], keep: bool
) -> list[torch.Tensor | None]:
    leaves = [_leaf(x) for x in xs]
    wanted = [leaf for leaf in leaves if _differentiable(leaf)]
    used = [(y, w) for y, w in zip(ys, weights, strict=True) if y.requires_grad]
    if not used or not wanted:
        return [None] * len(xs)
    with raw():
        got = torch.autograd.grad(
            [y for y, _ in used], wanted, [w for _, w in used], retain_graph=keep or None, allow_unused=True
        )
    by_id = {id(t): g for t, g in zip(wanted, got, strict=True)}
    return [by_id.get(id(leaf)) for leaf in leaves]


def _differentiable(tensor: torch.Tensor) -> bool:
    with raw():
        return tensor.requires_grad


def trainable_variables_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The parameters and variables that ``loss`` was computed from, in the order of their creation where known.

    Args:
        loss: a tensor with a graph behind it.
    """
    found: dict[int, torch.Tensor] = {}
    for leaf in leaves_of([loss]) if loss.grad_fn is not None else ():
        record = find_record(leaf)
        owner = record.tensor if record is not None and record.tensor is not None else leaf
        found.setdefault(id(owner), owner)
    order: dict[int, int] = {}
    for tensor in found.values():
        record = find_record(tensor)
        if record is not None:
            for place, known in enumerate(record.store.records()):
                order.setdefault(id(known), place)
    last = len(order)

    def rank(tensor: torch.Tensor) -> int:
        record = find_record(tensor)
        return last if record is None else order[id(record)]

    return sorted(found.values(), key=rank)
