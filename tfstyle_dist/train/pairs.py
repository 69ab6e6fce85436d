"""What a TF-style optimizer is given: losses, variables, pairs of gradient and variable; checked before any update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.train.sums import value_of
from tfstyle_dist.values import IndexedSlices, PerReplica
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.replicated import Replicated

_NUMBERS = (bool, int, float, complex, list, tuple, np.ndarray, np.generic)


def losses_of(loss: Any) -> list[torch.Tensor]:
    """The losses of ``compute_gradients``.

    Args:
        loss: a tensor, a list of tensors, or a function returning one of these.

    Raises:
        TypeError: something else.
    """
    value = loss() if callable(loss) and not isinstance(loss, torch.Tensor) else loss
    losses = list(value) if isinstance(value, list | tuple) else [value]
    for entry in losses:
        if not isinstance(entry, torch.Tensor):
            raise TypeError(
                f"The loss must be a tensor, a list of tensors, or a function that returns one, got {entry!r} "
                f"({type(entry).__name__}). Return the loss from the function, as it was computed from the variables."
            )
    return losses


def variables_of(var_list: Any) -> list[Any]:
    """The variables that ``var_list`` holds.

    Args:
        var_list: a variable, or a nest of iterables of them; of a mapping its values count.

    Raises:
        TypeError: something else, as a model or a function.
    """
    if isinstance(var_list, torch.Tensor):
        return [var_list]
    if isinstance(var_list, torch.nn.ParameterList | torch.nn.ParameterDict):
        return list(var_list.parameters())
    entries = var_list.values() if isinstance(var_list, Mapping) else var_list
    if isinstance(entries, str | torch.nn.Module) or not isinstance(entries, Iterable):
        raise TypeError(
            f"var_list must be a list of parameters or variables, got a {type(var_list).__name__}; write e.g. "
            "var_list=list(model.parameters())."
        )
    return [variable for entry in entries for variable in variables_of(entry)]


def union(lists: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of all ``lists``, each once."""
    return list({id(v): v for part in lists for v in part}.values())


def pairs_of(grads_and_vars: Iterable[Any], caller: str) -> list[tuple[Any, Any]]:
    """The pairs of ``apply_gradients`` with gradients that are tensors of their variables' shapes, or ``None``.

    Args:
        grads_and_vars: the pairs.
        caller: the call, for messages.

    Raises:
        TypeError: no pair, a second entry that is no variable, or a gradient that is none.
        InvalidArgumentError: a gradient of another shape than its variable, which would be broadcast.
        ValueError: no pairs.
    """
    pairs = [_pair(pair, place, caller) for place, pair in enumerate(grads_and_vars)]
    if not pairs:
        raise ValueError("No gradients provided: grads_and_vars is empty. Give [(gradient, variable), ...].")
    return pairs


def _pair(pair: Any, place: int, caller: str) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not _is_variable(pair[1]):
        got = f"a {type(pair).__name__}"
        if isinstance(pair, tuple | list):
            got = f"({', '.join(_in_words(entry) for entry in pair)})"
        raise TypeError(
            f"{caller} takes pairs of a gradient and its variable, in this order, got {got} as pair {place}. Give e.g. "
            "[(gradient, variable)] with a Variable or a parameter."
        )
    return _gradient(pair[0], pair[1], caller), pair[1]


def _is_variable(value: Any) -> bool:
    if isinstance(value, Replicated | torch.nn.Parameter):
        return True
    leaf = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    return leaf or find_record(value) is not None


def _in_words(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind


def _gradient(gradient: Any, variable: Any, caller: str) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, PerReplica):
        return PerReplica([_gradient(part, variable, caller) for part in gradient.values])
    gradient = value_of(gradient)  # of a variable that collects gradients: what this replica has in it
    shape = tuple(variable.shape)
    if isinstance(gradient, IndexedSlices):
        gradient = _rows(gradient, shape)
    elif isinstance(gradient, _NUMBERS):
        gradient = torch.as_tensor(gradient, dtype=variable.dtype)
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(
            f"{caller}: the gradient of {_name(variable)} must be a tensor, IndexedSlices, a number or None, got "
            f"{gradient!r} ({type(gradient).__name__}). Give what compute_gradients gave."
        )
    if tuple(gradient.shape) != shape:
        raise InvalidArgumentError(
            f"{caller}: the gradient of {_name(variable)} has the shape {tuple(gradient.shape)}, the variable has "
            f"{shape}. A gradient is not broadcast: give one with an entry for each entry of the variable, e.g. "
            "gradient.expand_as(variable) or gradient.reshape(variable.shape)."
        )
    if gradient.is_complex() and not variable.is_complex():
        raise TypeError(
            f"{caller}: the gradient of {_name(variable)} is {gradient.dtype}, the variable {variable.dtype}; its "
            "imaginary part would be lost. Give gradient.real, or make the variable complex."
        )
    if gradient.dtype is torch.bool:
        raise TypeError(
            f"{caller}: the gradient of {_name(variable)} is torch.bool, which has no sum. Give gradient.float()."
        )
    return gradient


def _rows(gradient: IndexedSlices, shape: tuple[int, ...]) -> Any:
    """``IndexedSlices`` as a sparse tensor."""
    shape = gradient.dense_shape or shape
    indices = gradient.indices.reshape(1, -1)
    values, row = gradient.values, tuple(gradient.values.shape[gradient.indices.dim() :])
    flat = (indices.shape[1], *shape[1:])
    if row != shape[1:] and tuple(values.shape) != flat and (values.numel() or indices.numel()):
        raise InvalidArgumentError(
            f"IndexedSlices with row numbers of shape {tuple(gradient.indices.shape)} have values of shape "
            f"{tuple(values.shape)}, and the rows of the variable the shape {shape[1:]}. Give values of shape "
            f"{(*gradient.indices.shape, *shape[1:])}."
        )
    try:
        return torch.sparse_coo_tensor(indices, values.reshape(flat), shape, check_invariants=True)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"IndexedSlices do not fit a variable of shape {shape}: {error}. Give row numbers of its first dimension, "
            "counted from 0."
        ) from error


def _name(variable: Any) -> str:
    record = find_record(variable)
    return "a tensor" if record is None else repr(record.describe())


def check_step(step: Any) -> None:
    """Refuses a ``global_step`` that cannot be increased, before anything was updated.

    Raises:
        TypeError: it is no variable.
    """
    if step is not None and not callable(getattr(step, "assign_add", None)):
        raise TypeError(
            f"global_step must be a Variable, got {step!r} ({type(step).__name__}); write e.g. "
            "global_step=Variable(0, dtype=torch.int64, trainable=False)."
        )
