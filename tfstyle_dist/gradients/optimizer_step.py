"""What is checked around ``optimizer.step()``, which every replica makes for itself; ``step_hooks`` calls it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.program_line import program_line
from tfstyle_dist.gradients import local_gradients
from tfstyle_dist.runtime.context import StrategyInForce, replica_of
from tfstyle_dist.variables.content.common_objects import in_elastic_job
from tfstyle_dist.variables.record import Record

TOLD_BY_SCALERS = "grad_scale", "found_inf"
"""The attributes by which a ``GradScaler`` tells a fused optimizer about one step; it deletes them after it."""


class UpdateRunner:
    """Checks the gradients before each step of a plain optimizer.

    Args:
        strategy: the owner of the parameters.

    Attributes:
        shares_optimizers: whether the local replicas have one optimizer in common.
    """

    shares_optimizers = False

    def __init__(self, strategy: StrategyInForce) -> None:
        self._strategy = weakref.ref(strategy)
        self._steps: list[dict[str, list[Any]]] = []

    @contextmanager
    def same_steps(self, count: int, running: Sequence[int] | None = None) -> Iterator[None]:
        """Around a run of several local replicas: each must make the same optimizer steps.

        Args:
            count: the local replicas.
            running: those that run here; default: all.

        Raises:
            CollectiveMismatchError: they did not.
        """
        before, self._steps = self._steps, [{} for _ in range(count)]
        try:
            yield
            all_steps = dict(enumerate(self._steps))
            ran = all_steps if running is None else {replica: all_steps[replica] for replica in running}
            _check_same(ran)
        finally:
            self._steps = before

    def before_step(self, optimizer: torch.optim.Optimizer, records: list[Record], args: Any, kwargs: Any) -> Any:
        """The step's pre-hook; returns changed arguments or ``None``."""
        strategy = self._strategy()
        if strategy is None:
            return None
        replica = replica_of(strategy)
        # Outside of run in one process there is one step, and what it wrote reaches all replicas.
        one_process = strategy.worker.group.size == 1 and not in_elastic_job(strategy.parameter_store)
        if isinstance(optimizer, torch.optim.LBFGS) and (replica is not None or not one_process):
            raise RuntimeError(
                "torch.optim.LBFGS calls its closure a different number of times on each replica, so the replicas "
                "would not make the same calls. Use a first-order optimizer, or run LBFGS under OneDeviceStrategy; in "
                "one process it may step outside of strategy.run, on the whole batch."
            )
        number = 0 if replica is None else replica.local_replica_id
        if replica is not None and torch_internals.backward_pass_under_way() != -1:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called while backward() is under way (in a hook of a "
                "parameter), when its gradients are those of one replica: the replicas would drift apart. Call it "
                "after backward()."
            )
        strategy.gradient_reducer.check_reduced(records, number)
        if replica is not None and strategy.num_replicas_in_sync > 1 and local_gradients.any_local():
            _check_not_local(optimizer, records, number)
        if replica is not None and number < len(self._steps):
            self._note(number, f"{type(optimizer).__name__}.step", sys._getframe(2))
        return None

    def _note(self, number: int, name: str, caller: FrameType) -> None:
        made = self._steps[number].setdefault(name, [0, ""])
        made[0] += 1
        if made[0] == 1:
            made[1] = program_line(caller)

    def after_step(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        """The step's post-hook."""

    def restore(self, error: Exception | None = None) -> None:
        """Puts back what a step that raised has left; called after each run.

        Args:
            error: with which the run ended.

        Raises:
            RuntimeError: the error is one that only we can explain.
        """


def _check_same(ran: Mapping[int, Mapping[str, Sequence[Any]]]) -> None:
    """Raises ``CollectiveMismatchError`` if replicas made different steps."""
    numbers = [{name: number for name, (number, _) in steps.items()} for steps in ran.values()]
    if all(steps == numbers[0] for steps in numbers):
        return
    made = [
        ", ".join(f"{name} at {line}, {number} time(s)" for name, (number, line) in steps.items())
        for steps in ran.values()
    ]
    lines = [f"  replica {r}: {what or 'no step'}" for r, what in zip(ran, made, strict=True)]
    raise CollectiveMismatchError(
        "The replicas made different optimizer steps, so their parameters differ now. Every replica must make the same "
        "ones:\n" + "\n".join(lines)
    )


def _check_not_local(optimizer: torch.optim.Optimizer, records: list[Record], number: int) -> None:
    for record in records:
        own = record.policy is not None and record.policy.reduce_at == "backward"
        if own and local_gradients.is_local(record.components[number].grad):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() would apply a result of torch.autograd.grad (parameter "
                f"{record.describe()!r}), which is the gradient of one replica: the replicas would drift apart. Call "
                "loss.backward(), or make the gradients one first: get_replica_context().all_reduce('MEAN', gradients)."
            )


def around_closure(
    around: Callable[[Callable[[], Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step with ``around(closure)`` in the place of its closure; ``None`` when it has none.

    The closure may take arguments, such as whether it is to call ``backward()``.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def inside(*given: Any, **named: Any) -> Any:
        return around(functools.partial(closure, *given, **named))

    if "closure" in kwargs:
        return args, {**kwargs, "closure": inside}
    return (args[0], inside, *args[2:]), kwargs
