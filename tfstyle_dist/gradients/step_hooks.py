"""Torch's public hooks around ``optimizer.step()``, and what is done there: whose optimizer it is, and its time.

They work with any ``torch.optim`` optimizer, with fused and foreach forms too. ``UpdateRunner`` says what is checked.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.process_hooks import Hooks, Patch
from tfstyle_dist.core.program_line import stack_from
from tfstyle_dist.gradients.divided_losses import say_divided_twice
from tfstyle_dist.gradients.optimizer_step import UpdateRunner, around_closure
from tfstyle_dist.runtime.clocks import COMPUTE, UPDATE, Clock
from tfstyle_dist.runtime.context import StrategyInForce, current_replica, replica_of
from tfstyle_dist.variables.content.state_objects import optimized_by
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.read_without_graph import say_without_gradient
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.store import ParameterStore


class _Ownership:
    """Which strategy an optimizer's parameters belong to; ``plain``: none of them is of a class of its own.

    It keeps no strategy alive: what a strategy holds may lead to the optimizer.
    """

    __slots__ = ("foreign", "key", "plain", "records", "stores")

    def __init__(self, optimizer: torch.optim.Optimizer, key: list[int]) -> None:
        self.key = key
        self.plain = all(
            type(p) in (torch.nn.Parameter, torch.Tensor) for g in optimizer.param_groups for p in g["params"]
        )
        self.records: list[Record] = []
        self.foreign: list[str] = []
        self.stores: list[ParameterStore] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                record = find_record(parameter)
                if record is None:
                    self.foreign.append(f"param_groups[{number}]['params'][{place}] of shape {tuple(parameter.shape)}")
                    continue
                self.records.append(record)
                if record.store not in self.stores:
                    self.stores.append(record.store)

    @property
    def strategy(self) -> Any:
        """The first one; ``None`` where there is none, or it is gone."""
        return self.stores[0].strategy if self.stores else None


_ownership: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Ownership] = weakref.WeakKeyDictionary()


def _owner(optimizer: torch.optim.Optimizer) -> _Ownership:
    key = [number for group in optimizer.param_groups for number in map(id, group["params"])]
    known = _ownership.get(optimizer)
    if known is None or known.key != key:
        known = _Ownership(optimizer, key)
        _ownership[optimizer] = known
    return known


def _clock(strategy: StrategyInForce) -> Clock:
    """That of the replica that calls."""
    replica = replica_of(strategy)
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
    A frame keeps alive what all of its callers hold, so none stays here longer than its step: one that raises gets no
    post-hook.
    """

    def __init__(self) -> None:
        self.outer: dict[int, FrameType] = {}
        self.quiet: set[int] = set()  # those that draw no random numbers

    def begin(self, optimizer: torch.optim.Optimizer, caller: FrameType) -> bool:
        """Whether this call is not within another one of the same optimizer."""
        if self.outer:
            above = set(map(id, stack_from(caller.f_back)))
            self.outer = {number: outer for number, outer in self.outer.items() if id(outer) in above}
            if id(optimizer) in self.outer:
                return False
        self.outer[id(optimizer)] = caller
        return True

    def end(self, optimizer: torch.optim.Optimizer, caller: FrameType) -> bool:
        """Whether the call that ends is the outer one."""
        if self.outer.get(id(optimizer)) is not caller:
            return False
        del self.outer[id(optimizer)]
        return True

    def is_quiet(self, optimizer: torch.optim.Optimizer, owner: _Ownership, args: Any, kwargs: Any) -> bool:
        """Whether a step that begins draws no random numbers; ``was_quiet`` says it at its end."""
        quiet = owner.plain and len(args) == 1 and not kwargs and torch_internals.steps_by_torch_alone(optimizer)
        (self.quiet.add if quiet else self.quiet.discard)(id(optimizer))
        return quiet

    def was_quiet(self, optimizer: torch.optim.Optimizer) -> bool:
        """What ``is_quiet`` has said of the step that ends."""
        quiet = id(optimizer) in self.quiet
        self.quiet.discard(id(optimizer))
        return quiet


_calls = _Calls()


class StepsEnd:
    """No step that begins within is under way behind it, in this thread, also if it raised."""

    # No generator: every run enters one.
    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _calls.outer = _calls.outer, dict(_calls.outer)

    def __exit__(self, *error: object) -> None:
        _calls.outer = self._before


def _take(thing: Any) -> None:
    """Makes an optimizer or scheduler content that the step function named nowhere one could look."""
    replica = current_replica()
    if replica is not None and replica.strategy.parameter_store.contents is not None:
        replica.strategy.parameter_store.contents.take(thing)


def _tell_contents(strategy: StrategyInForce, begins: bool) -> None:
    contents = strategy.parameter_store.contents
    if contents is not None and contents.active is not None and replica_of(strategy) is not None:
        (contents.random.begin_update if begins else contents.random.end_update)()


def _count_writes(strategy: StrategyInForce, optimizer: torch.optim.Optimizer) -> None:
    """Fused optimizers write without counting it; by the count other replicas learn of writes outside of ``run``."""
    contents = strategy.parameter_store.contents
    if contents is None or contents.active is not None:
        return
    states = [state.values() for state in optimizer.state.values() if isinstance(state, dict)]
    for written in chain(optimized_by(optimizer), *states):
        if isinstance(written, torch.Tensor) and not written.is_inference():
            torch.autograd.graph.increment_version(written)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    caller = sys._getframe(1)
    if not _calls.begin(optimizer, caller):
        return None
    try:
        return _begin(optimizer, args, kwargs)
    except BaseException:
        _calls.end(optimizer, caller)
        raise


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    owner, replica = _owner(optimizer), current_replica()
    _take(optimizer)
    strategy = owner.strategy
    in_run = replica is not None and replica.num_replicas_in_sync > 1
    if strategy is not None and owner.foreign and strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} mixes parameters of {strategy!r} with {len(owner.foreign)} "
            f"that belong to no strategy ({', '.join(owner.foreign[:3])}): those would differ from replica to "
            "replica. Build the whole model inside strategy.scope(), or call strategy.experimental_adopt(module), and "
            "strategy.experimental_adopt(tensor) for a tensor of no module; deepcopy, to_empty, peft and "
            "load_state_dict(assign=True) make new parameters that must be adopted again."
        )
    if len(owner.stores) > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds parameters of several strategies "
            f"({[store.strategy for store in owner.stores]}). Use one optimizer for each."
        )
    if not owner.records:
        if in_run and owner.key:
            assert replica is not None
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside strategy.run of {replica.strategy!r}, but none of its "
                "parameters belongs to the strategy: nothing would keep the replicas equal. Build the model inside "
                "strategy.scope(), or call strategy.experimental_adopt(module) before building the optimizer, and "
                "strategy.experimental_adopt(tensor) for a tensor of no module that all replicas train. What each "
                "replica changes on its own in a step, such as the examples of an attack, takes its gradient from "
                "torch.autograd.grad and is changed without an optimizer."
            )
        return None
    if in_run and replica is not None and strategy is not replica.strategy:
        known = "a strategy that is gone" if strategy is None else repr(strategy)
        raise RuntimeError(
            f"Mixing different tf.distribute strategies: {type(optimizer).__name__} holds parameters of {known} but "
            f"steps inside the run of {replica.strategy!r}. Make one strategy, and use it for scope(), the dataset and "
            "run."
        )
    if in_run:
        say_divided_twice(optimizer, owner.records)
    say_without_gradient((record, record.component().grad) for record in owner.records if record.kind == "variable")
    runner: UpdateRunner | None = None if strategy is None else strategy.update_runner
    if runner is None:
        return None
    if in_run and replica is not None:
        replica.begin_update()
    clock = _clock(strategy)
    clock.enter(UPDATE)
    if not _calls.is_quiet(optimizer, owner, args, kwargs):
        _tell_contents(strategy, begins=True)
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
    strategy = owner.strategy
    if strategy is not None and strategy.update_runner is not None:
        clock = _clock(strategy)
        strategy.update_runner.after_step(optimizer, owner.records)
        if not _calls.was_quiet(optimizer):
            _tell_contents(strategy, begins=False)
        _count_writes(strategy, optimizer)
        clock.leave()


def _step_schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``scheduler.step()``; torch has no hook for it."""
    _take(scheduler)
    return original(scheduler, *args, **kwargs)


def _add_group(original: Callable[..., Any], optimizer: torch.optim.Optimizer, param_group: Any) -> Any:
    """``add_param_group`` by each replica: with one optimizer for all, the first one's call adds it for the others."""
    replica = current_replica()
    if replica is not None and replica.local_replica_id > 0:
        runner = replica.strategy.update_runner
        if runner is not None and runner.shares_optimizers and isinstance(param_group, dict):
            given = param_group.get("params", ())
            given = [given] if isinstance(given, torch.Tensor) else list(given)
            param_group = {**param_group, "params": given}  # it may have been an iterator
            wanted = [id(p[1] if isinstance(p, tuple) else p) for p in given]
            if any(wanted == list(map(id, group["params"])) for group in optimizer.param_groups):
                return None
    return original(optimizer, param_group)


def _schedules() -> list[Patch]:
    """A patch for each of torch's classes that has a ``step`` of its own, such as ``ReduceLROnPlateau``."""
    known = torch.optim.lr_scheduler
    classes = {id(c): c for c in vars(known).values() if isinstance(c, type) and issubclass(c, known.LRScheduler)}
    return [Patch(c, "step", _step_schedule) for c in classes.values() if "step" in vars(c)]


step_hooks = Hooks(
    lambda: register_optimizer_step_pre_hook(_before),
    lambda: register_optimizer_step_post_hook(_after),
    patches=[*_schedules(), Patch(torch.optim.Optimizer, "add_param_group", _add_group)],
)
"""Installed while a strategy lives whose optimizers are watched."""
