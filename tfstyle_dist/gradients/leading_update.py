"""Central storage in one process: the first replica makes the one update, and the others go along."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch

from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.gradients.optimizer_step import TOLD_BY_SCALERS, UpdateRunner, around_closure
from tfstyle_dist.gradients.own_gradients import Own, own_gradients, say_different
from tfstyle_dist.runtime.clocks import UPDATE, WAIT
from tfstyle_dist.runtime.context import Frame, Replica, StrategyInForce, current_frame, pop, push
from tfstyle_dist.variables.central.shared_writes import same_values
from tfstyle_dist.variables.content.copies import Copier, copied
from tfstyle_dist.variables.record import Record

_Places = weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]]
_ROUNDING = 64  # of the last bit of the largest element


class LeadingUpdateRunner(UpdateRunner):
    """Runs the step of plain optimizers once for all local replicas, which share parameters and optimizer state.

    The replicas wait for each other before the update and after it. Then the others call the same ``step`` on groups
    without parameters, and what it changed in the optimizer is dropped.
    """

    shares_optimizers = True

    def __init__(self, strategy: StrategyInForce) -> None:
        super().__init__(strategy)
        self._open: list[_Update] = []
        # The places of the parameters that steps with empty groups have written to.
        self._writing: _Places = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer, records: list[Record], args: Any, kwargs: Any) -> Any:
        super().before_step(optimizer, records, args, kwargs)
        strategy, frame = self._strategy(), current_frame()
        if isinstance(frame, _Update) and frame.optimizer is not optimizer:
            outer, inner = type(frame.optimizer).__name__, type(optimizer).__name__
            raise RuntimeError(
                f"{outer}.step() called {inner}.step(). Under central storage in one process the first replica makes "
                f"the update for all and the others make an empty one, which would not be empty for {inner}. Step "
                f"{inner} in the step function itself, or use MirroredStrategy, where each replica makes its update."
            )
        replica = frame.replica if frame is not None and frame.strategy is strategy else None
        if strategy is None or replica is None or frame is None or frame.component is not None:
            return None
        own = _Update(strategy, replica, optimizer, records, self._writing)

        def outside(closure: Any) -> Any:
            """A closure is the replica's own code: it sees its own content."""
            own.end()
            own.is_in_step = False
            try:
                result = closure()
                own.note_gradients(keep=True)
            finally:
                own.begin()
            own.is_in_step = True
            return result

        changed = around_closure(outside, args, kwargs)
        if changed is None:  # else the closure makes the gradients
            own.note_gradients()
        own.barrier(f"{type(optimizer).__name__}.step")
        self._refuse_turns_within(own)
        self._open.append(own)
        own.begin()
        return changed

    def _refuse_turns_within(self, own: _Update) -> None:
        """A replica that begins while another one updates would take the parameters out of the one optimizer.

        What a replica that does not lead computed from groups without parameters would be wrong in any case.
        """
        if any(update.is_in_step for update in self._open):
            name = type(own.optimizer).__name__
            raise RuntimeError(
                f"{name}.step() calls all_reduce, all_gather, merge_call or something else that waits for the other "
                "replicas, such as a gradient that they sum, in a hook of its beginning or end, or in the step itself. "
                f"Under central storage in one process the first replica makes the update for all, so that {name} has "
                "no parameters in the others, and would have none in the first one when it goes on. Make that call in "
                "the step function, before or after optimizer.step(), or use MirroredStrategy, where each replica "
                "makes its update."
            )

    def after_step(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        frame = current_frame()
        if isinstance(frame, _Update):
            frame.end()
            self._open.remove(frame)
            frame.barrier(f"end of {type(optimizer).__name__}.step", UPDATE)
            vars(optimizer).update(frame.told)

    def restore(self, error: Exception | None = None) -> None:
        left, self._open = self._open, []
        for update in left:
            update.drop()
        within = [update for update in left if update.is_in_step]
        leading = next((update for update in within if update.leads), None)
        if error is not None and leading is not None:
            home = leading.strategy.parameter_store.parameter_device.torch_device
            if leading.strategy.worker.computes_elsewhere(home):
                error.add_note(
                    f"[tfstyle_dist] raised in {type(leading.optimizer).__name__}.step(), which the first replica "
                    f"makes for all with the parameters on {home}; the loss was computed with copies of them. An "
                    "optimizer that derives in its step (torch.autograd.grad) needs MirroredStrategy."
                )
        if error is not None and within and not any(update.leads for update in within):
            name = type(within[0].optimizer).__name__
            raise RuntimeError(
                f"{name}.step() failed without parameters ({type(error).__name__}: {error}). Under central storage in "
                "one process the first replica makes the update for all, and the others call step() with empty "
                "param_groups. Use MirroredStrategy, or start one process for each replica (torchrun)."
            ) from error


class _Update(Frame):
    """The frame of a replica inside ``optimizer.step()``.

    Attributes:
        optimizer: whose step it is.
        told: what this replica's gradient scaler has told the one optimizer for this step; it takes it back after it.
        is_in_step: in the step or a hook of it, not in a closure that the step has called.
    """

    __slots__ = ("_attributes", "_before", "_gradients", "_records", "_writing", "is_in_step", "optimizer", "told")
    replica: Replica

    def __init__(
        self,
        strategy: StrategyInForce,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        records: list[Record],
        writing: _Places,
    ) -> None:
        super().__init__(strategy, replica, component=0)
        self.optimizer, self._records = optimizer, records
        self._attributes: dict[str, Any] = {}
        self._gradients: Own = {}
        self._writing, self._before = writing, dict[int, torch.Tensor]()
        own = vars(optimizer)
        self.told = {name: own.pop(name) for name in TOLD_BY_SCALERS if name in own}
        self.is_in_step = True

    @property
    def leads(self) -> bool:
        """Whether the update is made in this replica."""
        return self.replica.local_replica_id == 0

    def note_gradients(self, keep: bool = False) -> None:
        """The replica has made the gradients that are applied; ``keep``: the update may change them meanwhile."""
        reducer, number = self.strategy.gradient_reducer, self.replica.local_replica_id
        self._gradients = own_gradients(reducer, self._records, number, keep)

    def barrier(self, kind: str, phase: int = WAIT) -> None:
        """All replicas come to the update, or to its end.

        Raises:
            RuntimeError: they have set gradients that differ, and that would count for the first one alone.
        """
        summed, name = self.strategy.gradient_reducer.summed, type(self.optimizer).__name__

        def compare(all_own: list[Own]) -> list[str]:
            summed.difference_update(map(id, self._records))
            return [say_different(name, all_own)] * len(all_own)

        own, self._gradients = self._gradients, {}
        if told := self.replica.barrier(kind, own, compare, phase):
            raise RuntimeError(told)

    @untraced
    def begin(self) -> None:
        """The objects are those of the update."""
        contents = self.strategy.parameter_store.contents
        if self.leads:
            contents.switch(None)
            contents.take_back(r.tensor for r in self._records if r.kind == "parameter")
            vars(self.optimizer).update(self.told)
        else:
            own = self.optimizer
            inside = contents.rows.inside
            self._before = {place: inside[place].detach().clone() for place in self._writing.get(own, ())}
            self._attributes = own.__dict__
            copy = Copier(lambda _: False, lambda tensor: copied(tensor, tensor.device))  # to be written in place
            groups = [{**{k: copy(v) for k, v in g.items() if k != "params"}, "params": []} for g in own.param_groups]
            kept = {k: copy(v) for k, v in own.__dict__.items() if k not in ("param_groups", "state")}
            own.__dict__ = {**kept, "param_groups": groups, "state": defaultdict(dict), **self.told}
        push(self)

    @untraced
    def end(self) -> None:
        """The objects are the replica's again."""
        pop(self)
        contents = self.strategy.parameter_store.contents
        if self.leads:
            for name in self.told:
                vars(self.optimizer).pop(name, None)
            contents.rows.spread()
            contents.switch(0)
        else:
            self.drop()
            before, self._before = self._before, {}
            self._look_at({place: contents.rows.inside[place].detach() for place in contents.rows.written()}, before)

    def _look_at(self, written: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
        """A step with empty groups has written to parameters: from the next one on their values are compared.

        Writes that change nothing but last bits, such as a limit to the weights in a hook, are good and taken back: the
        first replica has made them.

        Raises:
            RuntimeError: it has made the update once more.
        """
        if written:
            self._writing.setdefault(self.optimizer, set()).update(written)
        changed = {place: now for place, now in written.items() if not same_values(now, before.get(place, now))}
        if all(_is_rounding(now, before[place]) for place, now in changed.items()):
            with torch.no_grad():
                for place, now in changed.items():
                    now.copy_(before[place])
            return
        self.is_in_step = False
        name = type(self.optimizer).__name__
        raise RuntimeError(
            f"{name}.step(), or a hook of it, changes parameters that it does not take from param_groups, but from a "
            "list, dict or model that it keeps elsewhere. Under central storage in one process the first replica makes "
            "the update for all, and the others call step() with empty param_groups: these steps, and an earlier one, "
            "were made once for each replica. Let step() go through self.param_groups, or use MirroredStrategy, where "
            "each replica makes its update."
        )

    def drop(self) -> None:
        """The optimizer has its own attributes again."""
        if self._attributes:
            self.optimizer.__dict__, self._attributes = self._attributes, {}


def _is_rounding(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a projection, such as a norm that is made 1 again, gives the second time what it gave the first time."""
    if now.shape != before.shape or not (now.is_floating_point() or now.is_complex()) or not now.numel():
        return False
    most = _ROUNDING * torch.finfo(now.dtype).eps * before.abs().max()
    return bool((now - before.to(now.device)).abs().max() <= most)
