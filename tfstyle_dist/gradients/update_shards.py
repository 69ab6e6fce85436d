"""Which elements of which parameters a worker updates, when every worker updates a part of one shared copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.variables.content.copies import PLAIN_TENSORS
from tfstyle_dist.variables.content.state_objects import optimized_by
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.replicated import Replicated

# Their rules treat every element of a parameter for itself; subclasses may not.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
_NAMES = "Adafactor", "Muon", "SparseAdam"  # Muon is newer than the oldest torch
_BY_PARAMETER = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Their rules treat every parameter for itself."""
_GRAIN = 16  # elements
MOST = 1 << 18  # elements of a part: what an optimizer makes on the way then stays small, and in the cache


@dataclass(frozen=True)
class Part:
    """Elements of one parameter.

    Attributes:
        index: number of the parameter.
        start: first element, in the order of the memory.
        stop: the element after the last.
        whole: whether it is all of the parameter.
    """

    index: int
    start: int
    stop: int
    whole: bool


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the rule of an optimizer is known to treat every element for itself; a class may say so."""
    return type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False) is True


def is_divided(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each worker may make a part of an optimizer's update.

    A parameter of a class of its own may be added to in another way, such as a rotation: the part of one is none.
    """
    if not is_elementwise(optimizer) and type(optimizer) not in _BY_PARAMETER:
        return False
    return all(
        type(p) is torch.nn.Parameter or type(p) in PLAIN_TENSORS or isinstance(p, Replicated)
        for p in optimized_by(optimizer)
    )


def is_updated(parameter: torch.Tensor) -> bool:
    """Whether an optimizer may update a parameter; torch's update those that are frozen, if they have a gradient."""
    return parameter.requires_grad or parameter.grad is not None


def has_step_hooks(optimizer: torch.optim.Optimizer, before: bool = False) -> bool:
    """Whether code of the program runs within a step, where it may look at parameters, gradients or state.

    Args:
        optimizer: any that torch calls hooks for.
        before: of the hooks that run before the step alone.
    """
    of_all = [getattr(*place) for place in torch_internals.HOOKS_OF_STEPS]
    known = *torch_internals.hooks_of_step(optimizer), *of_all
    most = 0, 0, 1, 1  # the package has one before the steps of all optimizers, and one after them
    return any(len(hooks) > own for hooks, own in list(zip(known, most, strict=True))[:: 2 if before else 1])


def said_by_all(group: WorkerGroup, step: str, records: Sequence[Record], number: int) -> list[int]:
    """Meets the others before an update, which all make of the same parameters; the number of each.

    Args:
        group: of the workers.
        step: names the optimizer's step.
        records: of its parameters.
        number: what this worker has to say.

    Raises:
        CollectiveMismatchError: the workers update other parameters, or make other calls.
    """
    of_all = f"{step} of "
    checksum = hash(tuple(record.number for record in records)) & 0xFFFFFF
    try:
        return group.numbers(number, f"{of_all}{len(records)} parameters, checksum {checksum:06x}")
    except CollectiveMismatchError as error:
        if not error.calls or not all(call.startswith(of_all) for call in error.calls):
            raise
        raise CollectiveMismatchError(
            f"{error}\nUnder central storage the workers update one copy together, so that the optimizer of each must "
            "have the same parameters in the same order. A ZeroRedundancyOptimizer gives each worker a part of them: "
            "use the optimizer that it makes instead, whose state is divided among the workers already.",
            error.calls,
        ) from None


def share_out(sizes: Sequence[int], divisible: Sequence[bool], rank: int, size: int) -> list[Part]:
    """The parts of one worker: equal numbers of elements, in order, so that few parameters are divided.

    Args:
        sizes: elements of each parameter.
        divisible: whether its elements may be updated by several workers.
        rank: the worker.
        size: number of workers.
    """
    total = sum(sizes)
    low, high = (total * r // size for r in (rank, rank + 1))
    parts, offset = [], 0
    for index, (count, may_divide) in enumerate(zip(sizes, divisible, strict=True)):
        start, stop = (_cut(edge - offset, count) for edge in (low, high))
        if not may_divide:
            owner = min((offset + count // 2) * size // max(total, 1), size - 1)
            start, stop = (0, count) if owner == rank else (0, 0)
        step = MOST if may_divide else max(count, 1)
        edges = [*range(start, stop, step), stop]
        parts += [Part(index, a, b, b - a == count) for a, b in itertools.pairwise(edges) if b > a]
        offset += count
    return parts


def _cut(edge: int, count: int) -> int:
    """An edge inside a parameter of ``count`` elements, moved to a round number."""
    return 0 if edge <= 0 else count if edge >= count else edge // _GRAIN * _GRAIN
