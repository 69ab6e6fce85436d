"""The methods of a strategy about modules, gradients and random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.enums import ReduceOp, VariableAggregation
from tfstyle_dist.cross_device_ops.collective import reduce_over_workers
from tfstyle_dist.runtime.random_streams import seed_python
from tfstyle_dist.variables import Record, find_record
from tfstyle_dist.variables.adoption import adopt_module, adopt_tensor
from tfstyle_dist.variables.first_values import send_sparse, sendable
from tfstyle_dist.variables.gradient_policy import GradientPolicy
from tfstyle_dist.variables.record import raw
from tfstyle_dist.variables.wrapped_twice import check_adopted

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


def experimental_adopt(strategy: Strategy, module: Any) -> Any:
    """Takes over a module that was built outside the scope, or that lost its adoption; in place.

    A tensor that is trained without a module, such as a temperature or an image, is taken over as a parameter: a leaf
    that requires a gradient. Any other object with attributes of its own, or a tensor, may be given too: each replica
    of this process then finds its own values in it, as if the replica had a process of its own (``docs/replicas.md``).

    Args:
        module: its parameters and buffers become the strategy's; the first worker's values count. Or a tensor to be
            trained. Or an object whose attributes the step function changes: an optimizer wrapper, a running average,
            a counter.

    Returns:
        The same object.

    Raises:
        TypeError: an object without attributes of its own, such as a list or a number; for parameter servers a
            trained tensor that is no ``nn.Parameter``.
        ValueError: the module has uninitialised (lazy) parameters, or is in a ``DistributedDataParallel`` whose
            buckets its gradients are views of.
        RuntimeError: a parameter belongs to another strategy; or each of several replicas has made such a module, or
            such a tensor to be trained, of its own in a step.

    Example:
        >>> model = strategy.experimental_adopt(torch.nn.Linear(2, 1))
        >>> temperature = strategy.experimental_adopt(torch.zeros(1, requires_grad=True))
    """
    trained = isinstance(module, torch.Tensor) and module.is_leaf and module.requires_grad
    if trained or isinstance(module, torch.nn.Parameter):
        if strategy.adopts_modules:
            _check_made_outside(strategy, module)
            adopt_tensor(strategy.parameter_store, cast("torch.nn.Parameter", module))
            strategy.parameter_store.ensure_equal()
    elif not isinstance(module, torch.nn.Module):
        if not hasattr(module, "__dict__") or isinstance(module, type):
            raise TypeError(
                "experimental_adopt takes a torch.nn.Module or an object with attributes of its own, got "
                f"{type(module).__name__}. Put what the step changes into an attribute of an object."
            )
        strategy.parameter_store.adopt_object(module)
    elif strategy.adopts_modules:
        check_adopted(strategy.parameter_store, module)
        _check_made_once(strategy, module)
        adopt_module(strategy.parameter_store, module)
        strategy.parameter_store.ensure_equal()
    return module


def _check_made_once(strategy: Strategy, module: torch.nn.Module) -> None:
    """A module that each replica has made, as a copy of the best one so far, has no gradients that could be summed."""
    contents = strategy.parameter_store.contents
    if contents is None or not contents.was_made_by_each(module):
        return
    if any(find_record(parameter) is None for parameter in module.parameters()):
        raise RuntimeError(
            f"experimental_adopt was given a {type(module).__name__} that a step has made: each replica has one of its "
            "own in its place, and trained them apart. Take a copy of it for all replicas in the scope, with "
            "strategy.scope(): model.best = copy.deepcopy(model.best).requires_grad_(True), if it is model.best."
        )


def _check_made_outside(strategy: Strategy, tensor: torch.Tensor) -> None:
    """What replicas make in a step is each one's own: as one parameter it would have the mean of their gradients."""
    if strategy.num_replicas_in_sync > 1 and find_record(tensor) is None:
        strategy.require_cross_replica_context(
            "strategy.experimental_adopt(tensor) of a tensor to be trained",
            "it before strategy.run for what all replicas train together, and torch.autograd.grad without an optimizer "
            "for what each replica changes on its own in a step, such as the examples of an attack",
        )


def sync_buffers(strategy: Strategy) -> None:
    """Makes buffers such as BatchNorm statistics equal: floating ones become the mean over all replicas.

    Collective over the workers; call it in cross-replica context, e.g. before evaluation or saving. All others, and
    those of types without sums, such as float8, become those of the first replica; one message per kind.

    Raises:
        RuntimeError: called in replica context.

    Example:
        >>> strategy.sync_buffers()  # on every worker, before model.eval()
    """
    strategy.require_cross_replica_context("Strategy.sync_buffers", "merge_call")
    worker, store = strategy.worker, strategy.parameter_store
    if worker.num_replicas == 1:
        return
    store.settle()
    groups: dict[tuple[torch.dtype, VariableAggregation, torch.device], list[Record]] = {}
    living = store.alive_everywhere(store.records("buffer"))
    for record in living:
        first = record.components[0]
        if not sparse_parts.is_plain(first):
            if worker.group.size > 1:
                send_sparse(worker.group, first, f"buffer {record.local_name!r}")
            for component in list(record.components)[1:]:
                sparse_parts.fill(component, first)
            continue
        groups.setdefault((first.dtype, record.aggregation, first.device), []).append(record)
    with torch.no_grad(), raw():
        for (dtype, aggregation, _), records in groups.items():
            if aggregation is VariableAggregation.MEAN:
                flat = torch.cat(
                    [store.ops.sum_values([c.detach() for c in r.components]).reshape(-1) for r in records]
                )
                flat = reduce_over_workers(worker, ReduceOp.MEAN, flat, f"buffers ({dtype})")
            else:
                flat = torch.cat([r.components[0].detach().reshape(-1) for r in records])
                worker.group.broadcast(sendable(flat), 0, f"buffers ({dtype})")
            for record, value in zip(records, flat.split([r.components[0].numel() for r in records]), strict=True):
                for component in list(record.components):
                    component.copy_(value.view(component.shape))


def should_stop(strategy: Strategy, flag: bool = False) -> bool:
    """Whether any worker wants to stop, so that all leave the training loop at the same step.

    Collective over the workers: all call it at the same place of each step, in cross-replica context.

    Args:
        flag: this worker's wish.

    Returns:
        The same answer on all workers: whether one of them passed True.

    Raises:
        RuntimeError: called in replica context.

    Example:
        >>> for batch in batches:
        ...     strategy.run(step, args=batch)
        ...     if strategy.should_stop(time.monotonic() > limit):  # clocks and limits may differ by worker
        ...         break
    """
    strategy.require_cross_replica_context("Strategy.should_stop", "all_reduce of a flag")
    return any(strategy.worker.group.everyone.numbers(int(bool(flag)), "should_stop"))


def accumulate(strategy: Strategy) -> AbstractContextManager[None]:
    """Inside, ``backward()`` keeps gradients local (gradient accumulation); the first one after reduces the whole.

    Enter it on every worker alike, around ``run`` or inside the replica function.

    Returns:
        A context manager; with one replica it does nothing.

    Example:
        >>> with strategy.accumulate():
        ...     strategy.run(lambda: loss_of(batch).backward())
        >>> strategy.run(train_step, args=(batch,))
    """
    if strategy.gradient_reducer is None:
        return nullcontext()
    return strategy.gradient_reducer.accumulate()


def set_gradient_policy(
    strategy: Strategy,
    parameters: Iterable[torch.Tensor] | None = None,
    *,
    scale: ReduceOp | str | None = None,
    reduce_at: str | None = None,
) -> None:
    """Says how gradients of plain ``torch.optim`` training are reduced; alike on every worker.

    Args:
        parameters: which; ``None``: all that the strategy owns now.
        scale: over the replicas, MEAN, in which all weigh the same, or SUM. Until this is called it is the mean in
            which a replica weighs by the examples of its share, if the step's batch comes from a distributed
            dataset and its shares differ.
        reduce_at: ``"backward"`` or ``"apply"`` (left local for a TF-style optimizer).

    Raises:
        TypeError: ``parameters`` is a module or a tensor, or holds something else than tensors.
        ValueError: a parameter that this strategy does not own, none at all, or an unknown ``scale`` or ``reduce_at``.

    Example:
        >>> strategy.set_gradient_policy(scale="SUM")
    """
    GradientPolicy(reduce_at or "backward", ReduceOp.MEAN if scale is None else ReduceOp.from_any(scale))
    given = None if parameters is None else _several(parameters)
    if not strategy.adopts_modules:  # one replica: there is nothing to reduce
        return
    owned = list(strategy.parameter_store.records()) if given is None else [_own(strategy, p) for p in given]
    if not owned and given is None:
        raise ValueError(
            f"{strategy!r} owns no parameter yet, so set_gradient_policy would change nothing. Call it after the model "
            "was built in strategy.scope()."
        )
    for record in owned:
        if record.policy is None:
            continue
        if scale is not None:
            record.policy.scale, record.policy.by_examples = ReduceOp.from_any(scale), False
            if record.policy.scale is ReduceOp.SUM and strategy.gradient_reducer is not None:
                strategy.gradient_reducer.watch_before(record)
        if reduce_at is not None:
            record.policy.reduce_at = type(record.policy)(reduce_at, record.policy.scale).reduce_at


def _several(parameters: Any) -> list[torch.Tensor]:
    """The parameters that a program gave."""
    if isinstance(parameters, torch.nn.ParameterList):
        parameters = list(parameters)
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.nn.Module | torch.Tensor | str):
        write = "parameters=[tensor]" if isinstance(parameters, torch.Tensor) else "parameters=module.parameters()"
        raise TypeError(
            f"set_gradient_policy takes an iterable of tensors, got one {type(parameters).__name__}. Write {write}."
        )
    given = list(parameters)
    others = [p for p in given if not isinstance(p, torch.Tensor)]
    if others:
        raise TypeError(
            f"set_gradient_policy takes an iterable of tensors, got one that holds a {type(others[0]).__name__}. Write "
            "parameters=module.parameters(), or [p for name, p in module.named_parameters() if ...]."
        )
    if not given and isinstance(parameters, Iterator):
        raise ValueError(
            "set_gradient_policy got no parameters, so that it would change nothing. Leave parameters out for all that "
            "the strategy owns; a generator such as module.parameters() is empty once an optimizer has read it, so "
            "call it anew or write list(module.parameters())."
        )
    return given


def _own(strategy: Strategy, parameter: Any) -> Any:
    record = find_record(parameter)
    if record is None or record.store is not strategy.parameter_store:
        raise ValueError(
            f"A tensor of shape {tuple(parameter.shape)} does not belong to {strategy!r}; build its module in "
            "scope() or call experimental_adopt(module)."
        )
    return record


def seed_replicas(strategy: Strategy, seed: int, *, python: bool = False) -> None:
    """Gives every replica its own stream of random numbers, reproducible from ``seed``.

    Replica ``r`` draws what ``torch.manual_seed(seed + r)`` starts, whether it has a process of its own or not;
    the first replica of a process draws from the process' own stream. Without this call the other replicas of a
    process draw numbers that are derived from the state of that stream and their number.

    Args:
        seed: the same on all workers.
        python: ``random`` and numpy's global stream too; that costs about 0.15 ms whenever the turn passes.

    Example:
        >>> strategy.seed_replicas(1)
    """
    if strategy.parameter_store.contents is not None:
        strategy.parameter_store.contents.random.seed(seed, python)
        return
    torch.manual_seed(seed + strategy.worker.replica_id(0))
    if python:
        seed_python(seed + strategy.worker.replica_id(0))
