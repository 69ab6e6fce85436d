"""Says it when the replicas of a process go on with different weights: a step wrote what is its replica's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.core.logging import get_logger, warn_once
from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.known_tensors import find_record

if TYPE_CHECKING:
    from tfstyle_dist.variables.store import ParameterStore

RELATIVE, ABSOLUTE = 1e-4, 1e-6  # what other devices or kernels may round differently
_KINDS = (torch.Tensor, torch.nn.Parameter)  # what a class of its own compares is its affair
AT_A_TIME = 1 << 22  # elements that are compared at once, for which there must be memory beside the parameters

_given_up: weakref.WeakSet[ReplicaContents] = weakref.WeakSet()


def say_drift(store: ParameterStore, contents: ReplicaContents, number_of: Callable[[int], int]) -> None:
    """Warns, once for each, of parameters that are trained and have other values on another replica.

    So it does of variables whose copies are to be equal.

    It looks after runs 1, 2, 4, 8, ..., so that it costs nothing in the end. Where it cannot look (memory has run out,
    a kind of parameter cannot be compared) it stops looking: the run before it has succeeded.

    Args:
        store: of the strategy, between two runs.
        contents: of its replicas.
        number_of: tells the number that a replica of this process has in the job.
    """
    runs = store.runs
    if contents.may_differ or runs & (runs - 1) or contents in _given_up:
        return
    try:
        _look(contents, runs, number_of)
        _look_at_variables(store, runs, number_of)
    except Exception as error:
        _given_up.add(contents)
        get_logger().debug("Whether the replicas have other weights is not looked at any more: %r", error)


def _look(contents: ReplicaContents, runs: int, number_of: Callable[[int], int]) -> None:
    others = [replica for replica in range(contents.count) if replica != contents.first]
    for parameter in contents.parameters():
        record = find_record(parameter)
        if can_be_compared(parameter) and parameter.requires_grad and (record is None or record.leads):
            own = parameter.detach()
            different = next((r for r in others if differ(own, _inside(contents, parameter, r).detach())), None)
            if different is not None:
                who = f"After run {runs} replica {number_of(different)}"
                _warn(parameter, contents, who, number_of(contents.first), _settings(contents, different))


def _look_at_variables(store: ParameterStore, runs: int, number_of: Callable[[int], int]) -> None:
    """Those whose copies a step may write together only; of others, ``NONE`` and ``ON_READ``, each may have its own."""
    for record in store.records("variable"):
        alone = record.aggregation is VariableAggregation.NONE
        if alone or record.synchronization is VariableSynchronization.ON_READ:
            continue
        first, *others = (copy.detach() for copy in record.components)
        different = next((r for r, other in enumerate(others, 1) if differ(first, other)), None)
        if different is not None:
            warn_once(
                f"drift {id(record)}",
                f"After run {runs} replica {number_of(different)} has another value of the variable "
                f"{record.describe()!r} than replica {number_of(0)}, although its aggregation is "
                f"{record.aggregation.name}: an operation of torch in place (v.add_(x), v.mul_(x), v[0] = x, v *= x) "
                "changes the replica's own copy alone, without the aggregation, and outside of a step the first copy "
                "is read. Write v.assign(value), v.assign_add(value) or v += value, or create it with "
                "synchronization=ON_READ if each replica is to have its own value.",
            )


def can_be_compared(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of torch's own kinds, and has values."""
    return type(parameter) in _KINDS and parameter.layout is torch.strided and not parameter.is_meta


def _inside(contents: ReplicaContents, parameter: torch.Tensor, replica: int) -> torch.Tensor:
    """What a replica has in a parameter, or in the one that it made for itself in the place of it."""
    record = find_record(parameter)
    if record is not None and record.counterparts is not None:
        own = record.counterparts[replica].tensor
        parameter = parameter if own is None else own
    return contents.inside(parameter, replica)


def _settings(contents: ReplicaContents, replica: int) -> str:
    """Says which numbers in the groups of an optimizer a replica has other values of than the first one."""
    for optimizer, content in contents.objects():
        groups = getattr(optimizer, "param_groups", None)
        if isinstance(optimizer, torch.optim.Optimizer) and groups:
            for place, (group, other) in enumerate(
                zip(groups, content.dicts[replica].get("param_groups", ()), strict=False)
            ):
                for name, value in group.items():
                    if isinstance(value, int | float) and name in other and other[name] != value:
                        return (
                            f"{type(optimizer).__name__}.param_groups[{place}][{name!r}] is {other[name]} there, and "
                            f"{value} on the latter: what sets it, such as a schedule that holds numbers only and "
                            "belongs to no module, is shared by all replicas and advances once for each. Keep it in "
                            "an attribute of a module, or set it after strategy.run(...). "
                        )
    return ""


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether more than rounding, on other devices or by other kernels, makes two dense tensors differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if one.numel() > AT_A_TIME:
        longest = max(range(one.dim()), key=one.size)
        return any(map(differ, one.chunk(2, longest), other.chunk(2, longest)))
    other = other.to(one.device)
    if torch.equal(one, other):
        return False
    if one.dtype.itemsize == 1:  # torch computes nothing in 8 bits
        one, other = one.float(), other.float()
    return not torch.allclose(one, other, RELATIVE, ABSOLUTE, equal_nan=True)


def _warn(parameter: torch.Tensor, contents: ReplicaContents, who: str, first: int, settings: str) -> None:
    held = (
        f"{name!r} of {type(module).__name__}"
        for module, _ in contents.objects()
        if isinstance(module, torch.nn.Module)
        for name, own in module.named_parameters(recurse=False)
        if own is parameter
    )
    which = next(held, f"of shape {tuple(parameter.shape)}")
    warn_once(
        f"drift {id(parameter)}",
        f"{who} has other values of the parameter {which} than replica {first}: the step "
        "function (or an optimizer in it) wrote what is each replica's own, such as random numbers, statistics of its "
        f"share of the batch, or results of torch.autograd.grad. {settings}"
        "The replicas train different weights from now on. Do such writes before strategy.run (call the model once on "
        "a batch, if its first call sets parameters), or make the values one first: "
        'get_replica_context().all_reduce("MEAN", values). See docs/replicas.md.',
    )
