"""The state of an optimizer in memory that the workers of one host share: once, and whole for every worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.gradients.update_shards import Part
from tfstyle_dist.shm.segment import open_segment
from tfstyle_dist.variables.shared_home import dense_strides, offsets_of

State = dict[str, Any]


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
        self._own: dict[Part, State] = {}
        self._first: set[int] = set()
        self._loose: list[tuple[int, str]] = []
        self._parameters: list[torch.Tensor] = []

    def divide(self, parts: Sequence[Part], parameters: Sequence[torch.Tensor]) -> None:
        """Says which parts this worker updates from now on; nobody may be updating.

        Args:
            parts: of this worker.
            parameters: all of the optimizer.
        """
        self._parameters = list(parameters)
        self._first = {id(parameters[part.index]) for part in parts if part.start == 0}
        known = {id(p) for p in parameters}
        self._states = {key: state for key, state in self._states.items() if key in known}
        self._loose = [entry for entry in self._loose if entry[0] in known]
        self._own = {}
        for part in parts:
            parameter = parameters[part.index]
            key = id(parameter)
            if part.start > 0 and key in self._states:
                self._own[part] = {
                    name: value.clone()
                    for name, value in self._states[key].items()
                    if isinstance(value, torch.Tensor) and value.shape != parameter.shape
                }

    def is_stale(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the optimizer holds state that is not here, e.g. after ``load_state_dict``."""
        return any(
            (state := optimizer.state.get(p)) is not None and len(state) > 0 and state is not self._states.get(id(p))
            for p in parameters
        )

    def cut(self, part: Part, parameter: torch.Tensor, state: State) -> State:
        """The state of one part."""
        if part.whole:
            return dict(state)
        loaded = state is not self._states.get(id(parameter))  # then what this worker counted for itself is no more
        own = {} if loaded else self._own.get(part, {})
        return {
            name: part_of(value, parameter, part) if _is_full(value, parameter) else own.get(name, value)
            for name, value in state.items()
        }

    def put_back(self, part: Part, parameter: torch.Tensor, state: State) -> bool:
        """Takes the state of a part after a step; returns whether there is room for it here."""
        known = self._states.get(id(parameter))
        if known is None or any(name not in known for name in state):
            return False
        for name, value in state.items():
            target = known[name]
            if not isinstance(value, torch.Tensor):
                known[name] = value
                continue
            if not part.whole and _is_full(target, parameter):
                target = part_of(target, parameter, part)
            elif part.start > 0:
                self._own.setdefault(part, {})[name] = value
                continue
            if not isinstance(target, torch.Tensor) or target.shape != value.shape:
                return False
            if target.data_ptr() != value.data_ptr():  # the optimizer made a new tensor
                with torch.no_grad():
                    target.copy_(value)
        return True

    def share(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        pending: dict[Part, State],
    ) -> None:
        """Moves new state to shared memory, for all workers; collective.

        Args:
            optimizer: gets the whole state of every parameter.
            parameters: all of the optimizer.
            pending: the state of this worker's parts; emptied.
        """
        mine = {
            part.index: _describe(parameters[part.index], part, state)
            for part, state in pending.items()
            if part.start == 0
        }
        described: dict[int, dict[str, Any]] = {}
        for part in self._group.gather_objects({str(i): d for i, d in mine.items()}, "new optimizer state"):
            described.update({int(i): d for i, d in part.items()})
        fresh = {i: _empty(parameters[i], described[i]) for i in sorted(described)}
        tensors = [(state, k) for state in fresh.values() for k, v in state.items() if isinstance(v, torch.Tensor)]
        offsets, total = offsets_of([state[k] for state, k in tensors])
        memory = open_segment(self._group, total, "optimizer state").shared
        for (state, name), offset in zip(tensors, offsets, strict=True):
            like = state[name]
            flat = memory[offset : offset + like.numel() * like.element_size()].view(like.dtype)
            state[name] = flat.as_strided(like.shape, like.stride())
        with torch.no_grad():
            for part in reversed(list(pending)):  # the allocator gives back what is at the end of its heap
                self._fill(parameters[part.index], part, pending.pop(part), fresh.get(part.index, {}))
        self._group.numbers(0, "optimizer state is in shared memory")
        for index, state in fresh.items():
            parameter = parameters[index]
            self._states[id(parameter)] = optimizer.state[parameter] = state
            self._loose = [entry for entry in self._loose if entry[0] != id(parameter)]
            self._loose += [(id(parameter), k) for k, v in state.items() if not isinstance(v, torch.Tensor)]

    def _fill(self, parameter: torch.Tensor, part: Part, state: State, target: State) -> None:
        """Copies a part, and frees what was copied at once: there may be no room for both."""
        for name in reversed(list(state)):
            value = state.pop(name)
            if not isinstance(value, torch.Tensor) or name not in target:
                if part.start == 0 and name in target:
                    target[name] = value
            elif not part.whole and _is_full(target[name], parameter):
                part_of(target[name], parameter, part).copy_(value)
            elif part.start == 0:
                target[name].copy_(value)
            else:
                self._own.setdefault(part, {})[name] = value.clone()

    def pass_on_values(self, optimizer: torch.optim.Optimizer) -> None:
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
