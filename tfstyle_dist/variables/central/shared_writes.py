"""Central storage: what replicas write to the one copy of a parameter in their steps is written once.

Sharpness-aware steps, running averages of weights and updates by hand write to parameters themselves. Between two calls
that all make, each replica finds the values of the first of these calls, whatever another one has written meanwhile,
and all must come to the same ones. For that the values before a write must be known: those of parameters that steps
were seen to write to are kept, and for some time those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.content.parameter_marks import address_of, memory_of, overlap

_MOST_KEPT = 1 << 30
"""Bytes of all parameters, whose values are kept until it is known what steps write to; more are not."""
_MOST_COPIED, _MOST_RUNS = 16 << 30, 64
"""Bytes that are copied for it, some seconds in all, and runs; again where new parameters come."""


@dataclass(slots=True)
class _Values:
    """The values of a parameter at some time, the memory in which they were, and how often it had been written to."""

    memory: torch.Tensor
    values: torch.Tensor
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Values:
        """Those of now."""
        values = parameter.detach()
        return cls(values, values.clone(), torch_internals.version_of(parameter))

    def put_back(self, parameter: torch.Tensor, in_place: bool) -> None:
        """Gives them to the parameter again.

        Args:
            parameter: which.
            in_place: in the memory of then, which another one may have now, and with the version of then: a graph
                that has seen these values may be derived, and one that has seen others raises.
        """
        if in_place and address_of(parameter) != address_of(self.memory):
            parameter.data = self.memory
        with torch.no_grad():
            memory = parameter.data if in_place else parameter.detach()
            _once(memory, memory).copy_(_once(self.values, memory))
        if in_place:
            self.put_version(parameter)

    def put_version(self, parameter: torch.Tensor) -> None:
        """Says of a parameter that has these values that it was written to as often as then."""
        torch_internals.set_versions((parameter,), (self.version,))


def _once(values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Of ``values`` one for each place in ``memory``, which ``expand`` may have made of fewer."""
    strides = memory.stride() if memory.layout is torch.strided else ()
    return values[tuple(slice(None if stride else 1) for stride in strides)] if 0 in strides else values


@dataclass(slots=True)
class _Write:
    """What a replica has written to a parameter between two calls that all make.

    Attributes:
        replica: local number.
        replicas: all that have written so.
        before: at the first of these calls; ``None``: not known.
        after: at the second one.
    """

    replica: int
    replicas: set[int]
    before: _Values | None
    after: _Values


class SharedWrites:
    """The parameters of which there is one copy.

    Args:
        count: of the replicas.
        in_place: whether all replicas compute with the memory of the one copy.
    """

    def __init__(self, count: int, in_place: bool) -> None:
        self._replicas, self._in_place = range(count), in_place
        self._marks: list[tuple[int, Any]] = []  # by place: as the replica whose turn it is found it
        self._read: dict[int, _Values | None] = {}  # by place, those whose data it asked for: as it found them
        self._places: dict[int, list[int]] | None = None  # by memory; looked up when it is asked for
        self._calls: dict[int, int] = {}  # of each replica: how many calls it has made that all make
        self._writes: dict[int, dict[int, _Write]] = {}  # by the call before which they are, and place: the first one
        self._kept: dict[int, _Values] | None = None  # by place: as they were when the last call was made
        self._lent: dict[int, _Write] = {}  # by place: those that have their old values again for a replica
        self._habits: set[int] = set()  # by id: the parameters that steps were seen to write to
        self._left, self._runs, self._count = 0, 0, 0  # bytes to copy and runs in which all are kept; parameters
        self._alone: Callable[[], None] | None = None  # says what one replica alone has written

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """A run begins: nobody has written anything in it."""
        self._calls.clear()
        self.end()
        if len(parameters) > self._count:
            self._left, self._runs = _MOST_COPIED, _MOST_RUNS
        self._runs, self._count = self._runs - 1, len(parameters)
        if self._habits:
            self._habits &= set(map(id, parameters))

    def note(self, parameters: Sequence[torch.Tensor], replica: int | None) -> None:
        """What was written until now is not what the replica whose turn begins has done.

        Args:
            parameters: all.
            replica: which finds what it would find alone; ``None``: cross-replica context, which sees what was done.
        """
        if replica is None:
            self._kept = None
        else:
            call = self._calls.get(replica, 0) + 1
            if call not in self._writes:
                self._writes, self._kept = {call - 1: self._writes.get(call - 1, {}), call: {}}, None
            if self._kept is None:
                self._kept = self._values(parameters)
            for place, write in self._writes[call].items():
                if write.replica != replica and write.before is not None:
                    write.before.put_back(parameters[place], self._in_place)
                    self._lent[place] = write
        self._marks = list(map(_mark, parameters))
        self._read.clear()
        self._places = None

    def _values(self, parameters: Sequence[torch.Tensor]) -> dict[int, _Values]:
        strided = {place: p for place, p in enumerate(parameters) if p.layout is torch.strided}
        size = sum(parameter.nbytes for parameter in strided.values()) if self._left > 0 and self._runs >= 0 else 0
        if 0 < size <= _MOST_KEPT:
            self._left -= size
            kept = strided
        else:
            kept = {place: p for place, p in strided.items() if id(p) in self._habits}
        return {place: _Values.of(parameter) for place, parameter in kept.items()}

    def fail(self, parameters: Sequence[torch.Tensor]) -> None:
        """A run failed: what others than the first replica wrote since the last call is as it was.

        The first one's counters are those that all go on with.
        """
        self._alone = None
        for place, write in self._writes.get(max(self._calls.values(), default=0), {}).items():
            if 0 not in write.replicas and write.before is not None:
                write.before.put_back(parameters[place], self._in_place)

    def end(self) -> None:
        """A run ends, or is at a call that all make: nothing is kept any more."""
        if self._alone is not None:
            self._alone()
        self._alone = None
        self._writes.clear()
        self._kept = None

    def settle(self, parameters: Sequence[torch.Tensor]) -> None:
        """What was lent has the values again that were written."""
        for place, write in self._lent.items():
            write.after.put_back(parameters[place], self._in_place)
        self._lent = {}

    def data_is_read(self, place: int, data: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> None:
        """The replica whose turn it is has a tensor's ``data``: what it writes there leaves no mark.

        Args:
            place: of the parameter; below zero: the tensor is none, but may lie in the memory of some.
            data: what it has; ``None``: it has set it.
            parameters: as ``note`` got them, and those that came since.
        """
        others = [] if data is None or place >= 0 else self._at(data, parameters)
        for where in (place, *others):
            if 0 <= where < len(self._marks) and where not in self._read:
                same = _mark(parameters[where]) == self._marks[where]
                self._read[where] = _Values.of(parameters[where]) if same else None

    def _at(self, data: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The places of the parameters that a tensor lies in, as an entry of a state dict lies in one."""
        if self._places is None:
            self._places = {}
            for place, parameter in enumerate(parameters):
                self._places.setdefault(memory_of(parameter), []).append(place)
            self._places.pop(0, None)
        return [place for place in self._places.get(memory_of(data), ()) if overlap(data, parameters[place])]

    def is_counted(self, place: int, parameter: torch.Tensor) -> bool:
        """Whether the version of a parameter says that it was written to since ``note``."""
        return place >= len(self._marks) or _mark(parameter) != self._marks[place]

    def compare(self, replica: int, parameters: Sequence[torch.Tensor]) -> list[int]:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.
            parameters: as ``note`` got them, and those that came since.

        Returns:
            The places of the parameters that it has written to.

        Raises:
            RuntimeError: it has written other values than another replica between the same two calls, or once more.
        """
        call = self._calls[replica] = self._calls.get(replica, 0) + 1
        written, lent = self.written(parameters), self._lent
        self._lent = {place: write for place, write in lent.items() if place not in written}
        writes = self._writes.setdefault(call, {})
        for place in written:
            self._habits.add(id(parameters[place]))
            value = parameters[place].detach()
            first = writes.get(place)
            if first is None or first.replica == replica:
                before = self._before(place, value) if first is None else first.before
                writes[place] = _Write(replica, {replica}, before, _Values.of(parameters[place]))
            elif not same_values(value, first.after.values):
                raise RuntimeError(_said(value, first, replica, place in lent))
            else:
                first.replicas.add(replica)
                if self._in_place and address_of(value) == address_of(first.after.memory):
                    first.after.put_version(parameters[place])
        self.settle(parameters)
        if all(self._calls.get(other, 0) >= call for other in self._replicas):
            for place, write in writes.items():
                if others := set(self._replicas) - write.replicas:
                    self._alone = partial(_say_alone, min(others), tuple(parameters[place].shape), write.replica)
            self.note(parameters, replica)  # the last one may go on at once
        return written

    def _before(self, place: int, now: torch.Tensor) -> _Values | None:
        known = (self._kept or {}).get(place, self._read.get(place))
        if known is None or self._in_place:
            return known
        return known if (known.values.shape, known.values.dtype) == (now.shape, now.dtype) else None

    def written(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The places of the parameters that were written to since ``note``, in the order of ``parameters``."""
        marks, read = list(map(_mark, parameters)), self._read
        if marks == self._marks and not read:
            return []
        return [
            place
            for place, (before, now) in enumerate(zip(self._marks, marks, strict=False))
            if before != now or (place in read and _differs(parameters[place], read[place]))
        ]


def _differs(parameter: torch.Tensor, known: _Values | None) -> bool:
    return known is None or not same_values(parameter.detach(), known.values)


def _mark(parameter: torch.Tensor) -> tuple[int, Any]:
    return torch_internals.version_of(parameter), address_of(parameter)


def _say_alone(replica: int, shape: tuple[int, ...], writer: int) -> None:
    warn_once(
        f"a write of one replica alone {shape}",
        f"A parameter of shape {shape} was written to by replica {writer} in strategy.run, and not by replica "
        f"{replica}, which found the values before until its next call that all replicas make. Under central storage "
        "all replicas must write alike. A step that does something once, as if not done: done = True, asks a variable "
        "that all replicas share: do it before strategy.run(...), or in merge_call.",
    )


def _said(parameter: torch.Tensor, first: _Write, then: int, lent: bool) -> str:
    what = (
        f"A parameter of shape {tuple(parameter.shape)} was written to by replica {first.replica} and then by replica "
        f"{then} in one call of strategy.run, and the second write "
    )
    if lent:
        return what + (
            "gave it other values. Under central storage there is one copy of the parameters for all replicas, so all "
            "must write the same values. Make them of what is the same in all replicas, such as gradients after "
            "backward() or what get_replica_context().all_reduce(...) gave, or use MirroredStrategy, where each "
            "replica has its own parameters."
        )
    return what + (
        "changed it again. Under central storage there is one copy of the parameters for all replicas, and the values "
        "before the first write are not known: steps began to write to it late, or the parameters are very large, or "
        "it got another shape. Write to it in the first runs too, or through its data (p.data.mul_(0.5)), or in "
        "merge_call or after strategy.run(...), or use MirroredStrategy, where each replica has its own parameters."
    )


def same_values(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same values, NaN included; what is not strided is never said to."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return False
    other = other.to(one.device)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
