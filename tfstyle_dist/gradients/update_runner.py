"""Who runs ``optimizer.step()``: every worker for itself, or one leader replica for its process.

Works through PyTorch's public step hooks, so any ``torch.optim`` optimizer does, fused and foreach forms too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tfstyle_dist.runtime.clocks import COMPUTE, UPDATE, Clock
from tfstyle_dist.runtime.context import Frame, current_frame, pop, push
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
    """Runs the step of plain optimizers once per process and lets every replica see the result.

    Args:
        strategy: the owner of the parameters.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.ref(strategy)

    def before_step(self, optimizer: torch.optim.Optimizer, records: list[Record], args: Any, kwargs: Any) -> Any:
        """The step's pre-hook; returns changed arguments or ``None``."""
        strategy = self._strategy()
        if strategy is None:
            return None
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RuntimeError(
                "torch.optim.LBFGS calls its closure a different number of times on each replica, so the "
                "replicas would not "
                "meet. Use a first-order optimizer, or run LBFGS under OneDeviceStrategy."
            )
        frame = current_frame()
        replica = frame.replica if frame is not None and frame.strategy is strategy else None
        strategy.gradient_reducer.check_reduced(records, 0 if replica is None else replica.local_replica_id)
        if not strategy.parameter_store.replaces or replica is None or frame is None or frame.component is not None:
            return None
        leader = replica.local_replica_id == 0
        replica.meet(f"{type(optimizer).__name__}.step", None, lambda payloads: payloads)
        own = Frame(strategy, replica, component=0) if leader else Frame(strategy, replica, follower=True)
        push(own)
        return _closure_outside(own, args, kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        """The step's post-hook."""
        strategy, frame = self._strategy(), current_frame()
        if strategy is None:
            return
        if frame is None or frame.replica is None or not (frame.follower or frame.component is not None):
            if strategy.parameter_store.replaces:
                strategy.parameter_store.after_update(records)
            return
        pop(frame)
        if frame.component is not None:
            strategy.parameter_store.after_update(records)
        frame.replica.meet(f"end of {type(optimizer).__name__}.step", None, lambda payloads: payloads, UPDATE)


def _closure_outside(own: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A closure is the replica's own code: the update frame does not hold while it runs."""

    def outside(closure: Callable[[], Any]) -> Any:
        pop(own)
        try:
            return closure()
        finally:
            push(own)

    return _closure_in(outside, args, kwargs)


def _closure_in(
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
    frame = current_frame()
    replica = frame.replica if frame is not None and frame.strategy is strategy else None
    clock: Clock = strategy.worker.clocks[0 if replica is None else replica.local_replica_id]
    return clock


def _closure_counted(clock: Clock, args: Any, kwargs: Any) -> Any:
    """A closure computes; it is no part of the update."""
    if not clock.on or not (kwargs or len(args) > 1):
        return None

    def counted(closure: Callable[[], Any]) -> Any:
        with clock.counting(COMPUTE):
            return closure()

    return _closure_in(counted, args, kwargs)


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


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not _calls.begin(optimizer, sys._getframe(1)):
        return None
    owner = _owner(optimizer)
    frame = current_frame()
    in_run = frame is not None and frame.replica is not None and frame.strategy.num_replicas_in_sync > 1
    if owner.records and owner.foreign and owner.strategies[0].num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} mixes parameters of {owner.strategies[0]!r} with {len(owner.foreign)} "
            f"that belong to "
            f"no strategy ({', '.join(owner.foreign[:3])}): those would differ from replica to replica. Build "
            f"the whole model "
            "inside strategy.scope(), or call strategy.experimental_adopt(module); deepcopy, to_empty, peft and "
            "load_state_dict(assign=True) make new parameters that must be adopted again."
        )
    if len(owner.strategies) > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds parameters of several strategies ({owner.strategies}). Use one "
            f"optimizer for each."
        )
    if not owner.records:
        if in_run and owner.key:
            assert frame is not None
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside strategy.run of {frame.strategy!r}, but none of its "
                f"parameters "
                "belongs to the strategy: nothing would keep the replicas equal. Build the model inside "
                "strategy.scope(), or "
                "call strategy.experimental_adopt(module) before building the optimizer."
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
        clock.leave()


def install() -> None:
    """Registers the step hooks for the first strategy that needs them."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))
            _handles.append(_guard_schedulers())


def uninstall() -> None:
    """Takes the hooks away after the last such strategy."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _handles:
                _handles.pop().remove()


class _Restore:
    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


def _guard_schedulers() -> _Restore:
    """Makes ``scheduler.step()`` in several replica threads an error: it would advance L times a step.

    PyTorch has no hook for schedulers, so the method is wrapped while such a strategy lives.
    """
    base = torch.optim.lr_scheduler.LRScheduler
    original = base.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()
        if frame is not None and frame.replica is not None and frame.strategy.worker.num_local_replicas > 1:
            raise RuntimeError(
                f"{type(self).__name__}.step() inside strategy.run would run once per replica "
                f"({frame.strategy.worker.num_local_replicas} times a step): a scheduler belongs to the worker. "
                f"Call it after "
                "strategy.run(...), or in merge_call."
            )
        return original(self, *args, **kwargs)

    base.step = step  # type: ignore[method-assign]

    def undo() -> None:
        if base.step is step:
            base.step = original  # type: ignore[method-assign]

    return _Restore(undo)
