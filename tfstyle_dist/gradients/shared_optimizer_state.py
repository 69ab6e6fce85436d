"""The state of an optimizer in memory that the workers of one host share: once, and whole for every worker.

What a worker writes to it outside of an update, such as ``state["exp_avg"].zero_()``, stays its own until the next
update, as with parameters (``variables/central/shared_home.py``).
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core import sparse_parts
from tfstyle_dist.gradients.update_shards import Part
from tfstyle_dist.shm import pages
from tfstyle_dist.shm.segment import Segment, Written, open_segment, written_in
from tfstyle_dist.variables.central.shared_home import dense_strides, offsets_of

State = dict[str, Any]
_TRIM_EVERY = 32  # parts


@dataclass
class _Places:
    """Where the state of one parameter is.

    Attributes:
        segment: the memory.
        names: of all entries, those that are no tensors among them.
        seen: the tensors as the program sees them.
        shared: the same; writes are seen by every worker.
    """

    segment: Segment
    names: frozenset[str]
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)


class SharedState:
    """State tensors of one optimizer, by parameter.

    Of a divided parameter the elementwise tensors are updated by all holders of a part; anything else, such as a step
    count, by the holder of the first part, while the others count for themselves.

    Args:
        group: the workers of one host.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._states: dict[int, State] = {}
        self._places: dict[int, _Places] = {}
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._own: dict[Part, State] = {}
        self._first, self._loose = set[int](), list[tuple[int, str]]()
        self._parts, self._parameters = list[Part](), list[torch.Tensor]()

    def divide(self, parts: Sequence[Part], parameters: Sequence[torch.Tensor]) -> None:
        """Says which parts this worker updates from now on; nobody may be updating.

        Args:
            parts: of this worker.
            parameters: all of the optimizer.
        """
        self._parameters = list(parameters)
        self._first = {id(parameters[part.index]) for part in parts if part.start == 0}
        known = {id(p) for p in parameters}
        for key in self._states.keys() - known:
            self._drop(key)
        self._parts = [part for part in parts if part.start > 0]
        self.count_anew()

    def count_anew(self) -> None:
        """What this worker counts for itself is what is shared."""
        self._own = {}
        for part in self._parts:
            parameter = self._parameters[part.index]
            if id(parameter) in self._places:
                shared = self._places[id(parameter)].shared
                self._own[part] = {name: t.clone() for name, t in shared.items() if t.shape != parameter.shape}

    def let_go(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """A parameter is not shared any more: each worker has its state for itself.

        Args:
            optimizer: gets it.
            parameter: the one.
        """
        if optimizer.state.get(parameter) is self._states.get(id(parameter)) and id(parameter) in self._places:
            for tensor in self._places[id(parameter)].seen.values():
                tensor.data = tensor.clone()
        self._drop(id(parameter))

    def _drop(self, key: int) -> None:
        self._states.pop(key, None)
        self._places.pop(key, None)
        self._loose = [entry for entry in self._loose if entry[0] != key]

    def is_stale(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the optimizer holds state that is not here, e.g. after ``load_state_dict``."""
        return any((state := optimizer.state.get(p)) and not self._is_known(id(p), state) for p in parameters)

    def _is_known(self, key: int, state: State | None) -> bool:
        """Whether the state of a parameter is that which it was given here, with the same tensors."""
        if state is None or state is not self._states.get(key):
            return False
        place = self._places[key]
        return state.keys() == place.names and all(state[name] is tensor for name, tensor in place.seen.items())

    def written(self) -> Written:
        """What this worker wrote to state since the last update."""
        return written_in(self._segments)

    def cut(self, part: Part, parameter: torch.Tensor, state: State) -> State:
        """The state of one part."""
        known = self._is_known(id(parameter), state)
        inside = {**state, **self._places[id(parameter)].shared} if known else dict(state)
        if part.whole:
            return inside
        own = self._own.get(part, {}) if known else {}  # what was loaded counts, not what this worker has counted
        return {
            name: part_of(value, parameter, part) if _is_full(value, parameter) else own.get(name, value)
            for name, value in inside.items()
        }

    def put_back(self, part: Part, parameter: torch.Tensor, state: State, known: State | None) -> bool:
        """Takes the state of a part after a step.

        Args:
            part: the elements.
            parameter: of which.
            state: of the part.
            known: the state that the optimizer has of the parameter.

        Returns:
            Whether there is room for it here.
        """
        if known is None or not self._is_known(id(parameter), known) or not state.keys() <= known.keys():
            return False
        shared = self._places[id(parameter)].shared
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                known[name] = value
                continue
            target = shared.get(name)
            if target is not None and not part.whole and _is_full(target, parameter):
                target = part_of(target, parameter, part)
            elif part.start > 0:
                self._own.setdefault(part, {})[name] = value
                continue
            if target is None or target.shape != value.shape:
                return False
            if target.data_ptr() != value.data_ptr():  # the optimizer made a new tensor
                with torch.no_grad():
                    target.copy_(value)
        return True

    def share(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], pending: dict[Part, State]
    ) -> None:
        """Moves new state to shared memory, for all workers; collective.

        Args:
            optimizer: gets the whole state of every parameter.
            parameters: all of the optimizer.
            pending: the state of this worker's parts; emptied.
        """
        sparse_parts.make_dense(pending.values())
        mine = {
            part.index: _describe(parameters[part.index], part, state)
            for part, state in pending.items()
            if part.start == 0
        }
        described: dict[int, dict[str, Any]] = {}
        for part in self._group.gather_objects({str(i): d for i, d in mine.items()}, "new optimizer state"):
            described.update({int(i): d for i, d in part.items()})
        fresh = {i: _empty(parameters[i], described[i]) for i in sorted(described)}
        tensors = [(i, state, k) for i, state in fresh.items() for k, v in state.items() if isinstance(v, torch.Tensor)]
        offsets, total = offsets_of(state[k].nbytes for _, state, k in tensors)
        segment = open_segment(self._group, total, "optimizer state")
        places = {i: _Places(segment, frozenset(state)) for i, state in fresh.items()}
        for (index, state, name), offset in zip(tensors, offsets, strict=True):
            like, place = state[name], places[index]
            place.shared[name] = _view_of(segment.shared, offset, like)
            place.seen[name] = state[name] = _view_of(segment.private, offset, like)
        with torch.no_grad():
            for number, part in enumerate(list(pending)):
                state = pending.pop(part)
                if part.index in fresh:
                    self._fill(parameters[part.index], part, state, fresh[part.index], places[part.index])
                if number % _TRIM_EVERY == 0:
                    pages.trim_heap()
        self._segments.add(segment)
        self._group.numbers(0, "optimizer state is in shared memory")
        for index, state in fresh.items():
            parameter = parameters[index]
            _keep_objects(optimizer.state.get(parameter, {}), state, places[index].seen)
            self._states[id(parameter)] = optimizer.state[parameter] = state
            self._places[id(parameter)] = places[index]
            self._loose = [entry for entry in self._loose if entry[0] != id(parameter)]
            self._loose += [(id(parameter), k) for k, v in state.items() if not isinstance(v, torch.Tensor)]

    def _fill(self, parameter: torch.Tensor, part: Part, state: State, target: State, place: _Places) -> None:
        """Copies a part, and frees what was copied at once: there may be no room for both."""
        for name in reversed(list(state)):
            value, shared = state.pop(name), place.shared.get(name)
            if shared is None or not isinstance(value, torch.Tensor):
                if part.start == 0 and name in target:
                    target[name] = value
            elif not part.whole and _is_full(shared, parameter):
                part_of(shared, parameter, part).copy_(value)
            elif part.start == 0:
                shared.copy_(value)
            else:
                self._own.setdefault(part, {})[name] = value.clone()

    def pass_on_values(self) -> None:
        """Tells all workers the state that is no tensor, where there is some; collective then."""
        if not self._loose:
            return
        places = {id(p): index for index, p in enumerate(self._parameters)}
        mine = [
            [places[key], name, value]
            for key, name in self._loose
            if key in self._first and _is_plain(value := self._states[key][name])
        ]
        for said in self._group.gather_objects(mine, "optimizer state"):
            for index, name, value in said:
                self._states[id(self._parameters[index])][name] = value


def _keep_objects(current: State, state: State, seen: dict[str, torch.Tensor]) -> None:
    """The tensors that the optimizer has, and the program may hold, get the memory that is seen from now on."""
    for name, tensor in seen.items():
        held = current.get(name)
        if type(held) is torch.Tensor and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            held.data = tensor
            seen[name] = state[name] = held


def _view_of(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride()).detach()


def part_of(tensor: torch.Tensor, parameter: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of a part: a view, if ``tensor`` lies in memory as its parameter does; else a copy."""
    if tensor.is_contiguous() and parameter.is_contiguous():
        return tensor.view(-1)[part.start : part.stop]
    strides = dense_strides(parameter)
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))[part.start : part.stop]


def _is_full(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _describe(parameter: torch.Tensor, part: Part, state: State) -> dict[str, Any]:
    """What the holder of the first part tells the others, so that all make room for the same."""
    told: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            told[name] = ["value", value if _is_plain(value) else None]
            continue
        elements = value.shape == parameter.shape if part.whole else value.shape == (part.stop - part.start,)
        shape = list(parameter.shape) if elements else list(value.shape)
        told[name] = ["elements" if elements else "tensor", shape, str(value.dtype).removeprefix("torch.")]
    return told


def _empty(parameter: torch.Tensor, told: dict[str, Any]) -> State:
    """The state of one parameter without values; tensors on the meta device."""
    state: State = {}
    for name, (kind, *rest) in told.items():
        if kind == "value":
            state[name] = rest[0]
            continue
        shape, dtype = rest[0], getattr(torch, rest[1])
        strides = dense_strides(parameter) if kind == "elements" else None
        empty = torch.empty(shape, dtype=dtype, device="meta")
        state[name] = empty if strides is None else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return state
