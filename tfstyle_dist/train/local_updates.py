"""``apply_gradients(skip_gradients_aggregation=True)``: each replica updates its own copy with its own gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.cross_device_ops.collective import true_device
from tfstyle_dist.runtime.clocks import UPDATE
from tfstyle_dist.runtime.context import Frame, Replica, entered
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.content.common_objects import in_elastic_job
from tfstyle_dist.variables.record import Placement, Record

if TYPE_CHECKING:
    from tfstyle_dist.train.optimizer import TFOptimizer


def apply_own(optimizer: TFOptimizer, strategy: Strategy, replica: Replica, pairs: list[tuple[Any, Any]]) -> None:
    """Applies the calling replica's gradients to its copies.

    Args:
        optimizer: whose rule.
        strategy: in force, with several replicas.
        replica: the ReplicaContext.
        pairs: gradient or ``None``, and variable.

    Raises:
        NotImplementedError: the copies are one, in memory that several processes share; or the rule is that of a
            wrapped ``torch.optim`` optimizer, which knows one copy in each process.
            Under central storage and in an elastic job: the replicas' gradients differ.
        RuntimeError: the replicas list different variables.
    """
    central = strategy.parameter_store.placement is Placement.CENTRAL
    if central and strategy.worker.group.size > 1:
        raise NotImplementedError(
            "skip_gradients_aggregation=True under CentralStorageStrategy with several processes: there is one copy of "
            "the variables, and no replica has one of its own. Leave it out, or use MirroredStrategy."
        )
    if strategy.worker.num_local_replicas == 1:
        optimizer._update([(g, v) for g, v in pairs if g is not None])
        return
    if central or in_elastic_job(strategy.parameter_store):
        _apply_equal(optimizer, strategy, replica, pairs, "under central storage" if central else "in an elastic job")
        return
    if not optimizer.updates_copies:
        raise NotImplementedError(
            f"skip_gradients_aggregation=True of {type(optimizer).__name__}, which wraps a torch.optim optimizer, with "
            "several replicas in one process: it has the state of one copy. Start one process for each replica, or use "
            "one of the optimizers of the train module."
        )
    if (contents := strategy.parameter_store.contents) is not None:
        contents.may_differ = True

    def joint(payloads: list[list[tuple[Any, Any]]]) -> list[None]:
        same_variables(payloads)
        with entered(Frame(strategy)), strategy.worker.clocks[0].counting(UPDATE), torch.no_grad():
            optimizer.begin_step()
            for number, own in enumerate(payloads):
                for grad, variable in own:
                    if grad is not None:
                        update_copy(optimizer, grad, variable, number)
        return [None] * len(payloads)

    replica.barrier(f"{optimizer.get_name()}.apply_gradients without aggregation", pairs, joint)


def _apply_equal(
    optimizer: TFOptimizer, strategy: Strategy, replica: Replica, pairs: list[tuple[Any, Any]], where: str
) -> None:
    """One update for all replicas: they have one copy, or copies that stay equal because replicas change workers.

    Raises:
        NotImplementedError: the replicas gave different gradients.
    """
    told = [(None if grad is None else _digest(grad), variable) for grad, variable in pairs]

    def joint(payloads: list[list[tuple[str | None, Any]]]) -> list[None]:
        variables = same_variables(payloads)
        for place, variable in enumerate(variables):
            if len({payload[place][0] for payload in payloads}) > 1:
                record = find_record(variable)
                raise NotImplementedError(
                    f"apply_gradients(skip_gradients_aggregation=True) {where} was given different gradients "
                    f"of {'a variable' if record is None else record.describe()!r} by the replicas, but the update is "
                    "made once for all of them. Make the gradients equal first "
                    "(get_replica_context().all_reduce('SUM', gradients)), or leave skip_gradients_aggregation out."
                )
        with entered(Frame(strategy)):
            optimizer._update([(grad, variable) for grad, variable in pairs if grad is not None])
        return [None] * len(payloads)

    replica.barrier(f"{optimizer.get_name()}.apply_gradients without aggregation", told, joint)


def _digest(grad: torch.Tensor) -> str:
    """A text that is equal for equal gradients."""
    parts = [torch_internals.indices_of(grad), torch_internals.values_of(grad)] if grad.is_sparse else [grad]
    found = hashlib.blake2b(f"{tuple(grad.shape)} {grad.dtype}".encode(), digest_size=16)
    for part in parts:
        found.update(bytes_of(part.detach().contiguous()).cpu().numpy().tobytes())
    return found.hexdigest()


def same_variables(payloads: Sequence[Sequence[tuple[Any, Any]]]) -> list[Any]:
    """The variables of some pairs of gradient and variable, which must be the same on every replica.

    Raises:
        RuntimeError: they are not.
    """
    variables = [v for _, v in payloads[0]]
    order = [id(v) for v in variables]
    for number, other in enumerate(payloads):
        if [id(v) for _, v in other] != order:
            raise RuntimeError(
                f"apply_gradients: replica {number} lists other variables, or another order, than replica 0. Give the "
                "same list on every replica; a missing gradient is None."
            )
    return variables


def update_copy(optimizer: TFOptimizer, grad: torch.Tensor, variable: Any, replica: int) -> None:
    """Applies the rule to one replica's copy, with slots of its own."""
    record = find_record(variable)
    slots = optimizer.slots_of(variable)
    if record is None:  # belongs to no strategy: updated once for each replica
        target = variable.detach()
    else:
        if record.placement is not Placement.CENTRAL:
            slots = _slots_of_copies(optimizer, variable, record, slots)[replica]
        target = record.components[replica].detach()
        record.changes += 1
    optimizer.update_tensor(target, grad, slots)
    constrain(variable, target)


def constrain(variable: Any, component: torch.Tensor) -> None:
    """Applies the variable's own constraint to one copy."""
    constraint = getattr(variable, "_tfstyle_constraint", None)
    if constraint is not None:
        component.copy_(constraint(component.detach().clone()))


def _slots_of_copies(
    optimizer: TFOptimizer, variable: Any, record: Record, shared: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """The first replica's slots are the shared ones; those of the others begin as copies of them."""
    copies = optimizer.copy_slots.get(id(variable))
    if copies is None:
        places = [true_device(component) for component in record.components]
        copies = {r: {k: v.to(places[r], copy=True) for k, v in shared.items()} for r in range(1, len(places))}
        optimizer.copy_slots[id(variable)] = copies
    return {0: shared, **copies}
