"""Ranks of one host over central storage: each rank updates its part of the one copy, and of the optimizer's state.

So it is for optimizers that are known to treat every element, or every parameter, for itself. With another one, which
may take a norm over all parameters or draw random numbers, or with hooks around its steps, each rank makes the whole
update in pages of its own, and then they put it into the one copy.

While ``optimizer.step()`` runs, the parameter groups hold this rank's parts instead of the parameters. Afterwards they
hold the parameters again, and ``optimizer.state`` the whole state, which lies in shared memory: every rank can save it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.gradients.buckets import wants_sparse_gradient
from tfstyle_dist.gradients.optimizer_step import UpdateRunner, around_closure
from tfstyle_dist.gradients.shared_optimizer_state import SharedState, part_of
from tfstyle_dist.gradients.update_shards import (
    Part,
    has_step_hooks,
    is_divided,
    is_elementwise,
    is_updated,
    said_by_all,
    share_out,
)
from tfstyle_dist.runtime.context import StrategyInForce
from tfstyle_dist.variables.central.shared_home import SharedHome
from tfstyle_dist.variables.content.state_objects import optimized_by
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.record import Record

# What a worker has to say when all meet before an update.
_WRITTEN, _MOVED, _LOADED, _NEW_GROUPS, _UPDATED, _HOOKED = 1, 2, 4, 8, 16, 32
_SAY = {
    _WRITTEN: "wrote to its parameters or their state outside an optimizer",
    _MOVED: "gave its parameters other storage (module.to(), p.data = ...)",
    _LOADED: "loaded a state into the optimizer",
    _NEW_GROUPS: "changed the optimizer's parameter groups",
    _UPDATED: "changed parameters in the update",
}


class _Held:
    """A part of a parameter that this rank updates.

    Attributes:
        part: which elements.
        parameter: the user's parameter.
        tensor: what the optimizer sees in its place.
    """

    __slots__ = ("_flat", "parameter", "part", "tensor")

    def __init__(self, part: Part, parameter: torch.Tensor, home: SharedHome) -> None:
        self.part, self.parameter = part, parameter
        record = find_record(parameter)
        place = None if record is None else home.place_of(record)
        if place is None:  # not shared: every worker updates its own copy
            self.tensor: torch.Tensor = parameter
        else:
            view = place.shared_view() if part.whole else place.flat[part.start : part.stop]
            self.tensor = torch.nn.Parameter(view, requires_grad=parameter.requires_grad)

    @property
    def is_shared(self) -> bool:
        """Whether all workers see what is written to ``tensor``."""
        return self.tensor is not self.parameter

    def take_gradient(self) -> bool:
        """Gives the part its gradient; returns whether there is one."""
        grad = self.parameter.grad
        if grad is None:
            return False
        if self.is_shared:
            self.tensor.grad = grad if self.part.whole else part_of(grad, self.parameter, self.part)
        return True


class _Book:
    """What this rank updates for one optimizer.

    Attributes:
        key: of the parameters and where they are.
        divided: whether this rank makes a part of the update; else all of it.
        hooked: whether a step of it had hooks of the program on any rank; a hook that is gone may come again.
        shared: the parameters in shared memory, whose state is there too.
        saved: the parameters of each group, while the parts are in their place.
        known: those that had state before, if some get theirs in the step and others after it.
    """

    def __init__(self, key: tuple[int, ...], group: WorkerGroup) -> None:
        self.key, self.state, self.divided = key, SharedState(group), False
        self.hooked = False
        self.held: list[list[_Held]] = []
        self.shared: list[torch.Tensor] = []
        self.saved: list[Any] | None = None
        self.known: list[torch.Tensor] | None = None


class SharedUpdateRunner(UpdateRunner):
    """Runs the step of plain optimizers on every rank, each for its part.

    Args:
        strategy: the owner of the parameters.
        home: where they are.
    """

    def __init__(self, strategy: StrategyInForce, home: SharedHome) -> None:
        super().__init__(strategy)
        self._group: WorkerGroup = strategy.worker.group
        self._home = home
        self._books: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Book] = weakref.WeakKeyDictionary()

    @untraced
    def before_step(self, optimizer: torch.optim.Optimizer, records: list[Record], args: Any, kwargs: Any) -> Any:
        super().before_step(optimizer, records, args, kwargs)
        self._restore(optimizer)

        def outside(closure: Any) -> Any:
            """A closure sees the parameters; the step that follows it sees the parts."""
            self._restore(optimizer)
            loss = closure()
            self._begin(optimizer, records)
            return loss

        changed = around_closure(outside, args, kwargs) if is_divided(optimizer) else None
        if changed is None:
            self._begin(optimizer, records)
        return changed

    @untraced
    def after_step(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        book, name = self._books[optimizer], f"{type(optimizer).__name__}.step"
        if book.divided:
            fresh = self._take_back(optimizer, book)
            if any(self._group.numbers(int(bool(fresh)), f"end of {name}")):
                book.state.share(optimizer, list(optimized_by(optimizer)), fresh)
                if book.known is not None:
                    _order(optimizer, book.known)
            book.state.pass_on_values()
        else:
            written = self._home.written()
            self._check_alike(self._group.numbers(_UPDATED * bool(written), f"end of {name}"), name)
            if written:
                self._home.publish(written)
        for record in records:
            if record.tensor is not None:
                torch.autograd.graph.increment_version(record.tensor)

    def restore(self, error: Exception | None = None) -> None:
        self._restore()

    def _restore(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for known, book in list(self._books.items()):
            if book.saved is not None and (optimizer is None or known is optimizer):
                self._take_back(known, book)

    # ---- before -----------------------------------------------------------------------------------------------

    def _begin(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        """Meets the others, so that nobody still reads what is about to change, and puts the parts in place."""
        parameters = list(optimized_by(optimizer))
        book = self._books.get(optimizer)
        new = book is None or book.key != self._key(parameters)
        written, moved = self._home.written(), self._home.moved_out(records)
        if book is None:
            loaded = any(optimizer.state.get(p) for p in parameters)
        else:
            written += book.state.written()
            # A parameter that comes into the groups may have state from before.
            loaded = book.state.is_stale(optimizer, parameters if new and book.divided else book.shared)
        says = _WRITTEN * bool(written) | _MOVED * bool(moved) | _LOADED * loaded | _NEW_GROUPS * new
        name = f"{type(optimizer).__name__}.step"
        said = said_by_all(self._group, name, records, says | _HOOKED * has_step_hooks(optimizer))
        self._check_alike(said, name)
        hooked = any(number & _HOOKED for number in said)
        new = new or (hooked and book is not None and not book.hooked)
        if says or new:
            if moved:
                self._home.move_in(moved)
            if written:
                self._home.publish(written)
            if book is None:
                book = self._books[optimizer] = _Book(self._key(parameters), self._group)
            book.hooked |= hooked
            if new or moved:
                self._divide(book, optimizer)
            elif written:
                book.state.count_anew()
            if loaded:
                pending = {
                    h.part: book.state.cut(h.part, h.parameter, optimizer.state[h.parameter])
                    for held in book.held
                    for h in held
                    if h.is_shared and optimizer.state.get(h.parameter)
                }
                book.state.share(optimizer, parameters, pending)
            self._group.numbers(0, f"{name} goes on")
        assert book is not None
        self._put_in(optimizer, book)

    def _check_alike(self, said: list[int], name: str) -> None:
        for bit, what in _SAY.items():
            ranks = [r for r, number in enumerate(said) if number & bit]
            if 0 < len(ranks) < len(said):
                raise CollectiveMismatchError(
                    f"{name}: worker(s) {ranks} {what}, the other(s) of {len(said)} did not. There is one copy of the "
                    "parameters: do the same on every worker."
                )

    def _key(self, parameters: list[torch.Tensor]) -> tuple[int, ...]:
        return self._home.moves, *(id(p) * 2 + is_updated(p) for p in parameters)

    def _divide(self, book: _Book, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(optimized_by(optimizer))
        elementwise, book.divided = is_elementwise(optimizer), is_divided(optimizer)
        book.divided &= not book.hooked
        records = [find_record(p) if book.divided else None for p in parameters]
        shared = [r is not None and self._home.place_of(r) is not None for r in records]
        sizes = [p.numel() if s and is_updated(p) else 0 for p, s in zip(parameters, shared, strict=True)]
        rows = [r is not None and wants_sparse_gradient(r) for r in records]
        parts: dict[int, list[Part]] = {}
        for part in share_out(sizes, [elementwise and not r for r in rows], self._group.rank, self._group.size):
            parts.setdefault(part.index, []).append(part)
        book.key, book.held = self._key(parameters), []
        book.shared = [p for p, s in zip(parameters, shared, strict=True) if s]
        for parameter, is_shared in zip(parameters, shared, strict=True):
            if not is_shared:
                book.state.let_go(optimizer, parameter)
        index = 0
        for group in optimizer.param_groups:
            held = []
            for parameter in group["params"]:
                if not shared[index]:  # every worker updates its own
                    parts[index] = [Part(index, 0, parameter.numel(), True)]
                held += [_Held(part, parameter, self._home) for part in parts.get(index, ())]
                index += 1
            book.held.append(held)
        book.state.divide([h.part for held in book.held for h in held], parameters)

    # ---- the parts take the place of the parameters -----------------------------------------------------------

    def _put_in(self, optimizer: torch.optim.Optimizer, book: _Book) -> None:
        if not book.divided:
            return
        book.saved = [group["params"] for group in optimizer.param_groups]
        book.known = None if len(book.shared) == sum(map(len, book.saved)) else list(optimizer.state)
        for group, held in zip(optimizer.param_groups, book.held, strict=True):
            active = [h for h in held if h.take_gradient()]
            group["params"] = [h.tensor for h in active]
            for h in active:
                state = optimizer.state.get(h.parameter)
                if state and h.is_shared:
                    optimizer.state[h.tensor] = book.state.cut(h.part, h.parameter, state)

    def _take_back(self, optimizer: torch.optim.Optimizer, book: _Book) -> dict[Part, dict[str, Any]]:
        """Puts the parameters back; returns new state of this rank's parts."""
        fresh: dict[Part, dict[str, Any]] = {}
        if book.saved is None:
            return fresh
        for group, parameters in zip(optimizer.param_groups, book.saved, strict=True):
            group["params"] = parameters
        book.saved = None
        for held in book.held:
            for h in held:
                if not h.is_shared:
                    continue
                h.tensor.grad = None
                state = optimizer.state.pop(h.tensor, None)
                if state and not book.state.put_back(h.part, h.parameter, state, optimizer.state.get(h.parameter)):
                    fresh[h.part] = state
        return fresh


def _order(optimizer: torch.optim.Optimizer, known: list[torch.Tensor]) -> None:
    """Brings the state into the order that it has on one device: first what was there, then by parameter."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update({p: state[p] for p in (*known, *optimized_by(optimizer), *state) if p in state})
