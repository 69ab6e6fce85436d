"""``tf.function`` and ``tf.print``: names that ported programs use; PyTorch runs and prints at once."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any, TextIO

import torch

from tfstyle_dist.core import nest


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: str | None = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Callable[..., Any]:
    """Returns the function as it is, so that TensorFlow's decorator may stay where it is.

    A function that TensorFlow would trace once runs each time here: what it prints, or does in Python, happens in every
    call. ``torch.compile`` is what compiles.

    Args:
        func: the function; without it a decorator is returned.
        input_signature: accepted for TF's signature; so are all others.
        autograph: likewise.
        jit_compile: likewise.
        reduce_retracing: likewise.
        experimental_implements: likewise.
        experimental_autograph_options: likewise.
        experimental_attributes: likewise.
        experimental_relax_shapes: likewise.
        experimental_compile: likewise.
        experimental_follow_type_hints: likewise.

    Raises:
        TypeError: ``func`` cannot be called.

    Example:
        >>> @function
        ... def double(x):
        ...     return 2 * x
        >>> double(3)
        6

    Source: ``tf.function``.
    """
    if func is None:
        return lambda decorated: function(decorated)
    if not callable(func):
        raise TypeError(f"function takes something that can be called, got {type(func).__name__}: {func!r}.")
    return func


def print(
    *inputs: Any, output_stream: TextIO | None = None, summarize: int = 3, sep: str = " ", end: str = "\n"
) -> None:
    """Prints values as ``tf.print`` writes them: ``1``, ``[1 2 3]``; to standard error unless told otherwise.

    Args:
        *inputs: tensors, variables, nests of them, and anything else.
        output_stream: an open text file, such as ``sys.stdout``.
        summarize: of how many entries the beginning and the end of each dimension are written; -1: all are.
        sep: what comes between two of the inputs.
        end: what comes last.

    Raises:
        TypeError: ``output_stream`` cannot be written to, or ``summarize`` is no whole number.

    Example:
        >>> print("values:", torch.arange(8), output_stream=sys.stdout)
        values: [0 1 2 ... 5 6 7]

    Source: ``tf.print``.
    """
    stream = sys.stderr if output_stream is None else output_stream
    if not isinstance(summarize, Integral):
        raise TypeError(f"summarize must be a whole number, got {summarize!r}; -1 writes all entries.")
    if not hasattr(stream, "write"):
        raise TypeError(f"output_stream must be an open text file such as sys.stdout, got {output_stream!r}.")

    def show(leaf: Any) -> Any:
        return _Text(_written(leaf.detach().cpu(), summarize)) if isinstance(leaf, torch.Tensor) else leaf

    builtins.print(*(nest.map_structure(show, value) for value in inputs), sep=sep, end=end, file=stream)


class _Text(str):
    """Text that stays without quotes inside of lists."""

    __slots__ = ()
    __repr__ = str.__str__


def _written(tensor: torch.Tensor, summarize: int) -> str:
    if tensor.dim() == 0:
        return _number(tensor)
    count = len(tensor)
    if summarize >= 0 and count > 2 * summarize:
        rows = [*tensor[:summarize], None, *tensor[count - summarize :]]
    else:
        rows = list(tensor)
    texts = ["..." if row is None else _written(row, summarize) for row in rows]
    return "[" + (" " if tensor.dim() == 1 else "\n ").join(texts) + "]"


def _number(tensor: torch.Tensor) -> str:
    """With as few digits as tell the number from its neighbours, or all."""
    number = tensor.item()
    if isinstance(number, bool):
        return str(int(number))
    if not isinstance(number, float):
        return str(number)
    few, all_digits = (15, 17) if tensor.dtype is torch.float64 else (6, 9)
    text = f"{number:.{few}g}"
    return text if torch.tensor(float(text), dtype=tensor.dtype).equal(tensor) else f"{number:.{all_digits}g}"
