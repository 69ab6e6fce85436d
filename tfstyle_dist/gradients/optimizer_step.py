"""What is checked, and counted, around ``optimizer.step()``, which every replica makes for itself.

Works through PyTorch's public step hooks, so any ``torch.optim`` optimizer does, fused and foreach forms too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.gradients import local_gradients
from tfstyle_dist.runtime.clocks import COMPUTE, UPDATE, Clock
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.runtime.turns import users_line
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.store import find_record

_lock = threading.Lock()
_users = 0
_handles: list[Any] = []


class _Ownership:
    """Which strategy an optimizer's parameters belong to."""

    __slots__ = ("foreign", "key", "records", "strategies")

    def __init__(self, optimizer: torch.optim.Optimizer, key: tuple[int, ...]) -> None:
        self.key = key
        self.records: list[Record] = []
        self.foreign: list[str] = []
        self.strategies: list[Any] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                record = find_record(parameter)
                if record is None:
                    self.foreign.append(f"param_groups[{number}]['params'][{place}] of shape {tuple(parameter.shape)}")
                    continue
                self.records.append(record)
                if not any(s is record.store.strategy for s in self.strategies):
                    self.strategies.append(record.store.strategy)


_ownership: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Ownership] = weakref.WeakKeyDictionary()


def _owner(optimizer: torch.optim.Optimizer) -> _Ownership:
    key = tuple(id(p) for group in optimizer.param_groups for p in group["params"])
    known = _ownership.get(optimizer)
    if known is None or known.key != key:
        known = _Ownership(optimizer, key)
        _ownership[optimizer] = known
    return known


class UpdateRunner:
    """Checks the gradients before each step of a plain optimizer.

    Args:
        strategy: the owner of the parameters.

    Attributes:
        shares_optimizers: whether the local replicas have one optimizer in common.
    """

    shares_optimizers = False

    def __init__(self, strategy: Any) -> None:
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
            numbers = [{name: number for name, (number, _) in steps.items()} for steps in ran.values()]
            if any(steps != numbers[0] for steps in numbers):
                made = [
                    ", ".join(f"{name} at {line}, {number} time(s)" for name, (number, line) in steps.items())
                    for steps in ran.values()
                ]
                lines = [f"  replica {r}: {what or 'no step'}" for r, what in zip(ran, made, strict=True)]
                raise CollectiveMismatchError(
                    "The replicas made different optimizer steps, so their parameters differ now. Every replica must "
                    "make the same ones:\n" + "\n".join(lines)
                )
        finally:
            self._steps = before

    def before_step(self, optimizer: torch.optim.Optimizer, records: list[Record], args: Any, kwargs: Any) -> Any:
        """The step's pre-hook; returns changed arguments or ``None``."""
        strategy = self._strategy()
        if strategy is None:
            return None
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RuntimeError(
                "torch.optim.LBFGS calls its closure a different number of times on each replica, so the replicas "
                "would not make the same calls. Use a first-order optimizer, or run LBFGS under OneDeviceStrategy."
            )
        replica = _replica_of(strategy)
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
            made = self._steps[number].setdefault(f"{type(optimizer).__name__}.step", [0, ""])
            made[0] += 1
            if made[0] == 1:
                made[1] = users_line(sys._getframe(2))
        return None

    def after_step(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        """The step's post-hook."""

    def restore(self) -> None:
        """Puts back what a step that raised has left; called after each run."""


def _check_not_local(optimizer: torch.optim.Optimizer, records: list[Record], number: int) -> None:
    for record in records:
        own = record.policy is not None and record.policy.reduce_at == "backward"
        if own and local_gradients.is_local(record.components[number].grad):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() would apply a result of torch.autograd.grad (parameter "
                f"{record.describe()!r}), which is the gradient of one replica: the replicas would drift apart. Call "
                "loss.backward(), or make the gradients one first: get_replica_context().all_reduce('MEAN', gradients)."
            )


def _replica_of(strategy: Any) -> Any:
    frame = current_frame()
    return frame.replica if frame is not None and frame.strategy is strategy else None


def around_closure(
    around: Callable[[Callable[[], Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step with ``around(closure)`` in the place of its closure; ``None`` when it has none."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def inside() -> Any:
        return around(closure)

    if "closure" in kwargs:
        return args, {**kwargs, "closure": inside}
    return (args[0], inside, *args[2:]), kwargs


def _clock(strategy: Any) -> Clock:
    """That of the replica that calls."""
    replica = _replica_of(strategy)
    clock: Clock = strategy.worker.clocks[0 if replica is None else replica.local_replica_id]
    return clock


def _closure_counted(clock: Clock, args: Any, kwargs: Any) -> Any:
    """A closure computes; it is no part of the update."""
    if not clock.on or not (kwargs or len(args) > 1):
        return None

    def counted(closure: Callable[[], Any]) -> Any:
        with clock.counting(COMPUTE):
            return closure()

    return around_closure(counted, args, kwargs)


class _Calls(threading.local):
    """The step under way of each optimizer in this thread: the frame of torch's code that calls the hooks.

    An optimizer whose ``step`` calls ``super().step()`` gets the hooks twice; the inner call belongs to the outer one.
    """

    def __init__(self) -> None:
        self.outer: dict[int, FrameType] = {}

    def begin(self, optimizer: torch.optim.Optimizer, caller: FrameType) -> bool:
        """Whether this call is not within another one of the same optimizer."""
        outer = self.outer.get(id(optimizer))
        if outer is not None:  # may be left from a step that raised
            above = caller.f_back
            while above is not None:
                if above is outer:
                    return False
                above = above.f_back
        self.outer[id(optimizer)] = caller
        return True

    def end(self, optimizer: torch.optim.Optimizer, caller: FrameType) -> bool:
        """Whether the call that ends is the outer one."""
        if self.outer.get(id(optimizer)) is not caller:
            return False
        del self.outer[id(optimizer)]
        return True


_calls = _Calls()


def _take(thing: Any) -> None:
    """Makes an optimizer or scheduler content that the step function named nowhere one could look."""
    frame = current_frame()
    if frame is not None and frame.replica is not None and frame.strategy.parameter_store.contents is not None:
        frame.strategy.parameter_store.contents.take(thing)


def _tell_contents(strategy: Any, begins: bool) -> None:
    contents = strategy.parameter_store.contents
    if contents is not None and _replica_of(strategy) is not None:
        (contents.update_begins if begins else contents.update_ends)()


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not _calls.begin(optimizer, sys._getframe(1)):
        return None
    owner = _owner(optimizer)
    frame = current_frame()
    _take(optimizer)
    in_run = frame is not None and frame.replica is not None and frame.strategy.num_replicas_in_sync > 1
    if owner.records and owner.foreign and owner.strategies[0].num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} mixes parameters of {owner.strategies[0]!r} with {len(owner.foreign)} "
            f"that belong to no strategy ({', '.join(owner.foreign[:3])}): those would differ from replica to "
            "replica. Build the whole model inside strategy.scope(), or call strategy.experimental_adopt(module); "
            "deepcopy, to_empty, peft and load_state_dict(assign=True) make new parameters that must be adopted again."
        )
    if len(owner.strategies) > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds parameters of several strategies ({owner.strategies}). Use one "
            "optimizer for each."
        )
    if not owner.records:
        if in_run and owner.key:
            assert frame is not None
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside strategy.run of {frame.strategy!r}, but none of its "
                "parameters belongs to the strategy: nothing would keep the replicas equal. Build the model inside "
                "strategy.scope(), or call strategy.experimental_adopt(module) before building the optimizer."
            )
        return None
    if in_run and frame is not None and owner.strategies[0] is not frame.strategy:
        raise RuntimeError(
            f"Mixing different tf.distribute strategies: {type(optimizer).__name__} holds parameters of "
            f"{owner.strategies[0]!r} but steps inside the run of {frame.strategy!r}."
        )
    runner: UpdateRunner | None = owner.strategies[0].update_runner
    if runner is None:
        return None
    clock = _clock(owner.strategies[0])
    clock.enter(UPDATE)
    _tell_contents(owner.strategies[0], begins=True)
    try:
        changed = runner.before_step(optimizer, owner.records, args, kwargs)
        return _closure_counted(clock, *(changed or (args, kwargs))) or changed
    except BaseException:
        clock.leave()
        raise


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _calls.end(optimizer, sys._getframe(1)):
        return
    # As it was found before the step: the groups may hold parts of the parameters until the runner puts them back.
    owner = _ownership.get(optimizer) or _owner(optimizer)
    if owner.records and owner.strategies[0].update_runner is not None:
        clock = _clock(owner.strategies[0])
        owner.strategies[0].update_runner.after_step(optimizer, owner.records)
        _tell_contents(owner.strategies[0], begins=False)
        clock.leave()


def install() -> None:
    """Registers the step hooks for the first strategy that needs them."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))
            for patch in _patches:
                patch.install()


def uninstall() -> None:
    """Takes the hooks away after the last such strategy."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _handles:
                _handles.pop().remove()
            for patch in _patches:
                patch.uninstall()


def _step_schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``scheduler.step()``; torch has no hook for it. With one optimizer for all it would advance L times a step."""
    frame = current_frame()
    if frame is not None and frame.replica is not None and frame.strategy.update_runner.shares_optimizers:
        raise RuntimeError(
            f"{type(scheduler).__name__}.step() inside strategy.run would run once per replica "
            f"({frame.strategy.worker.num_local_replicas} times a step), but under central storage there is one "
            "optimizer for all of them. Call it after strategy.run(...), or in merge_call."
        )
    _take(scheduler)
    return original(scheduler, *args, **kwargs)


def _schedules() -> list[torch_internals.Patch]:
    """A patch for each of torch's classes that has a ``step`` of its own, such as ``ReduceLROnPlateau``."""
    known = torch.optim.lr_scheduler
    classes = {id(c): c for c in vars(known).values() if isinstance(c, type) and issubclass(c, known.LRScheduler)}
    return [torch_internals.Patch(c, "step", _step_schedule) for c in classes.values() if "step" in vars(c)]


_patches = _schedules()
