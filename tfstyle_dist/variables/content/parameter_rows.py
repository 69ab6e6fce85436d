"""What a parameter's inside is for each replica: data, gradient, version counter, what accumulates the gradient.

A row is the insides of all parameters for one replica. The parameters hold one row; each of the others is kept in as
many tensors. When the turn passes, the parameters and these tensors exchange their insides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.variables.central.home_row import HomeRow
from tfstyle_dist.variables.central.shared_writes import SharedWrites
from tfstyle_dist.variables.content import parameter_attributes
from tfstyle_dist.variables.content.copies import copied
from tfstyle_dist.variables.content.parameter_marks import (
    address_of,
    are_alike,
    hooks_of,
    is_same,
    left_memory,
    marks_of,
    put_hooks,
    swap_attributes,
    was_written,
)
from tfstyle_dist.variables.content.twins import Twins
from tfstyle_dist.variables.content.values_read import ValuesRead
from tfstyle_dist.variables.known_tensors import made_in_turns

_ATTRIBUTES = attrgetter(*torch_internals.HOOKS, "__dict__")
_PLAIN: tuple[Any, ...] = (None, None, {})  # mostly there are no hooks and no attributes


class ParameterRows:
    """The insides of all parameters of one strategy, by replica.

    Args:
        devices: of the local replicas.
        home: under central storage the device of the one copy of all parameters; ``None`` otherwise.
        elsewhere: whether some replica computes on another device than ``home``: then cross-replica context has a row
            of its own, after those of the replicas.

    Attributes:
        row, base: which row the parameters hold, and which one cross-replica context sees.
        inside: the parameters, during a run.
        twins: which memory of a row stands for which memory of the present one.
        references, writes: all parameters; what replicas write to the one copy.
        take: makes what a hook of a parameter is, or names, content.
    """

    take: Callable[..., bool]

    def __init__(self, devices: Sequence[ReplicaDevice], home: torch.device | None, elsewhere: bool) -> None:
        self._devices, self._home, self._elsewhere = devices, home, elsewhere
        self.row = self.base = len(devices) if elsewhere else 0
        self.references: list[Callable[[], torch.Tensor | None]] = []
        self._vessels, self._marks = [list[torch.Tensor]() for _ in range(len(devices) + elsewhere)], list[Any]()
        self._followers: list[list[tuple[int, Callable[[], torch.Tensor | None]]]] = []
        self._nothing, self._home_row, self._read = torch.empty(0), HomeRow(), ValuesRead()
        self.writes = SharedWrites(len(devices), in_place=not elsewhere)
        self.inside, self.twins = list[torch.Tensor](), Twins(self._pairs)

    # ---- membership -------------------------------------------------------------------------------------------

    def add(self, value: torch.Tensor, forget: Callable[[Any], None], running: bool) -> int:
        """One more parameter; returns its place.

        Args:
            value: its inside now is that of the present row; the other rows begin as copies.
            forget: called when it is gone.
            running: whether a run is under way.
        """
        others = {row: self._vessel(value, row) for row in range(len(self._vessels)) if row != self.row}
        for row, vessel in others.items():
            self._vessels[row].append(vessel)
        self.references.append(refer_to(value, forget))
        self._marks.append(marks_of(value))
        self._followers.append([])
        if running:
            self.inside.append(value)
        return len(self.references) - 1

    def _vessel(self, value: torch.Tensor, row: int) -> torch.Tensor:
        with torch.no_grad():
            device = self.device(row, value.device)
            data = (self.twins.share if self._shares else self.twins.copy_part)(row, value.detach(), device)
        vessel = torch.nn.Parameter(data, requires_grad=value.requires_grad)
        if value.grad is not None:
            vessel.grad = self._grad(row, value.grad, vessel.device)
        put_hooks(vessel, hooks_of(value), self.take)
        parameter_attributes.send(value, None, vessel)
        return vessel

    def _grad(self, row: int, grad: torch.Tensor, device: torch.device) -> torch.Tensor:
        own = self.twins.copy_part(row, grad, device)
        return own.copy_(grad) if grad.layout is torch.strided else own

    def _pairs(self, row: int) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        if row == self.row or self.row != self.base:
            return
        for reference, own, mark in zip(self.references, self._vessels[row], self._marks, strict=True):
            if (parameter := reference()) is None:
                continue
            yield parameter, parameter if self._shares else own if address_of(parameter) == mark[1] else None
            if parameter.grad is mark[3] and mark[3] is not None and own.grad is not None:
                yield mark[3], own.grad

    @property
    def _shares(self) -> bool:
        """Whether all rows have the same values: there is one copy."""
        return self._home is not None and not self._elsewhere

    def device(self, row: int, like: torch.device) -> torch.device:
        """Where a row's tensors live, given where those of cross-replica context do."""
        if row == len(self._devices) or self._shares or like.type == "meta":
            return like
        own = self._devices[row].torch_device
        return own if self._elsewhere or (like.type == own.type and like != own) else like

    def vessel(self, place: int, row: int) -> torch.Tensor:
        """What keeps the inside of a parameter for a row that the parameters do not hold."""
        return self._vessels[row][place]

    def follow(self, parameter: torch.Tensor, row: int, own: torch.Tensor) -> None:
        """What is written to one in cross-replica context reaches another one, which a replica has for it."""
        place, its = self._place(parameter), self._place(own)
        self._followers[place].append((row, refer_to(own)))
        if row != self.row and not self._shares and are_alike(parameter, own):  # so nobody needs memory twice
            if made_in_turns(parameter, own):
                self._vessels[row][its].detach().copy_(parameter.detach())  # as workers begin with the first one's
            self._vessels[row][place].data = self._vessels[row][its].detach()
            own.data = parameter.detach()
            self._read.forget(own)

    def _place(self, parameter: torch.Tensor) -> int:
        return next(place for place, inside in enumerate(self.inside) if inside is parameter)

    def let_go(self, place: int) -> None:
        """A parameter is gone; its memory is freed at once."""
        self._marks[place] = None
        for vessels in filter(None, self._vessels):
            vessels[place] = self._nothing

    def drop_dead(self) -> list[tuple[int, int]]:
        """Forgets what is gone; returns the ``id`` and the place of every parameter that stays."""
        alive = [place for place, reference in enumerate(self.references) if reference() is not None]
        self.references = [self.references[place] for place in alive]
        self._marks = [self._marks[place] for place in alive]
        self._followers = [self._followers[place] for place in alive]
        self._vessels = [[vessels[place] for place in alive] if vessels else [] for vessels in self._vessels]
        return [(id(p), place) for place, ref in enumerate(self.references) if (p := ref()) is not None]

    def resolve(self) -> bool:
        """Holds the parameters for the time of a run; returns whether all are there."""
        self.inside = [p for reference in self.references if (p := reference()) is not None]
        return len(self.inside) == len(self.references)

    # ---- the turn ---------------------------------------------------------------------------------------------

    def compare(self, replica: int) -> None:
        """A replica comes to a call of all, or its end: the others see what it wrote. See ``SharedWrites``."""
        if self._home is not None:
            self._write_all(self.writes.compare(replica, self.inside))

    def written(self) -> list[int]:
        """The places of the one copy's parameters that were written to in this turn."""
        return [] if self._home is None else self.writes.written(self.inside)

    def data_is_read(self, parameter: torch.Tensor, is_set: bool) -> None:
        """A parameter's ``data`` was read, or set, in cross-replica context: what is written there leaves no mark."""
        self._read.note(parameter, is_set)

    def data_is_read_in_turn(self, place: int, data: torch.Tensor | None) -> None:
        """A replica has read the ``data`` of the parameter at a place, or below zero of another tensor; or set it."""
        if self._home is not None:
            self.writes.data_is_read(place, data, self.inside)

    def switch(self, replica: int | None) -> None:
        """Exchanges the insides of all parameters with those of a replica, or of cross-replica context."""
        row = self.base if replica is None else replica
        self.writes.settle(self.inside)
        if row != self.row:
            self._swap(row)
        if self._home is not None:
            self.writes.note(self.inside, replica)

    def _swap(self, row: int) -> None:
        self.twins.forget()
        torch.clear_autocast_cache()  # it refers to the inside of each parameter that autocast has cast
        vessels, done = self._vessels[row], 0
        try:
            for parameter, vessel in zip(self.inside, vessels, strict=True):
                torch_internals.swap_insides(parameter, vessel)
                done += 1
        except BaseException as error:
            for parameter, vessel in zip(self.inside[:done], vessels, strict=False):
                torch_internals.swap_insides(parameter, vessel)
            error.add_note(
                f"[tfstyle_dist] while the turn passed from one replica to another: a parameter of shape "
                f"{tuple(self.inside[done].shape)} cannot be given another replica's content."
            )
            raise
        plain = [_PLAIN] * len(vessels)
        if list(map(_ATTRIBUTES, self.inside)) != plain or list(map(_ATTRIBUTES, vessels)) != plain:
            swap_attributes(self.inside, vessels)
        self._vessels[self.row], self._vessels[row] = vessels, []
        self.row = row

    def renew(self, everything: bool = False, begins: bool = False) -> list[int]:
        """Copies what was written in cross-replica context to the other rows; returns what ``left_memory`` says.

        Args:
            everything: values, gradients, hooks and attributes of all parameters are copied.
            begins: a run begins.
        """
        if begins:
            self.writes.begin(self.inside)
        dirty, left = self._read.take() | self.twins.written, list[int]()
        if everything or self._elsewhere or dirty or not all(map(is_same, self.inside, self._marks)):
            left = left_memory(self.inside, self._marks)
            with torch.no_grad():
                for place, parameter in enumerate(self.inside):
                    self._renew(place, parameter, dirty, left, everything)
        self.twins.forget()
        if self._elsewhere:
            self._home_row.lend(self.inside, self._vessels[0])
        return left

    def _renew(self, place: int, parameter: torch.Tensor, dirty: set[int], left: list[int], all_of_it: bool) -> None:
        version, address, _, grad, grad_version, hooks, attributes = self._marks[place]
        now, hooks_now = parameter.grad, hooks_of(parameter)
        moved = address_of(parameter) != address
        written = all_of_it or moved or was_written(parameter, version, dirty, left)
        new_grad = all_of_it or now is not grad or (now is not None and was_written(now, grad_version, dirty))
        followers = [(row, self._place(own)) for row, ref in self._followers[place] if (own := ref()) is not None]
        everywhere = [*((row, place) for row in range(len(self._vessels))), *followers]
        for row, where in filter(lambda at: at[0] != self.row, everywhere):
            vessel = self._vessels[row][where]
            if self._elsewhere or written:
                self._write(vessel, parameter, row, moved, written)
            if written and where != place and self._shares:  # it is that replica's alone, in all rows
                self.inside[where].data = parameter.detach()
            if new_grad:
                vessel.grad = None if now is None else self._grad(row, now, vessel.device)
            for leaf in (vessel, self.inside[where]):
                leaf.requires_grad_(parameter.requires_grad)
            if all_of_it or hooks_now != hooks:
                put_hooks(vessel, hooks_now, self.take)
            if all_of_it:
                vessel.__dict__, attributes = {}, None
            if parameter.__dict__ or attributes:
                parameter_attributes.send(parameter, attributes, vessel)  # what a replica put there itself stays

    def _write(self, vessel: torch.Tensor, parameter: torch.Tensor, row: int, moved: bool, counts: bool) -> None:
        device = vessel.device if row == len(self._devices) else self.device(row, parameter.device)
        part = None if self._shares else self.twins.noted(row, parameter)
        if part is not None and address_of(part) != address_of(vessel):
            vessel.data = part
        elif moved and part is None and not self._shares:
            vessel.data = self.twins.copy_part(row, parameter.detach(), device)  # it may have another one's memory now
        if self._shares:
            if address_of(vessel) != address_of(parameter):
                vessel.data = parameter.detach()
        elif are_alike(vessel, parameter) and vessel.device == device:
            (vessel if counts else vessel.data).copy_(parameter)  # in place: a step may have a view
        else:
            vessel.data = copied(parameter, device)

    def spread(self) -> None:
        """An update of the one copy was made inside a run: the replicas see it from now on."""
        self._write_all(range(len(self.inside)))

    def _write_all(self, places: Iterable[int]) -> None:
        with torch.no_grad():
            for place in places:
                counts = self.writes.is_counted(place, self.inside[place])
                for row, vessels in enumerate(self._vessels):
                    if row != self.row:
                        self._write(vessels[place], self.inside[place], row, False, counts)

    def take_back(self, places: Iterable[int]) -> None:
        """Cross-replica context sees what the first replica did to these parameters; see ``HomeRow``."""
        if self._elsewhere:
            self._home_row.take_back(self.inside, self._vessels[0], places)

    def mark(self) -> None:
        """Remembers the parameters as they are, and lets them go; compute devices keep values with a view alone."""
        self.take_back(range(len(self.inside)))
        self.writes.end()
        self._marks = [marks_of(parameter) for parameter in self.inside]
        if self._elsewhere:
            self._home_row.free(v for row in range(len(self._devices)) for v in self._vessels[row])
        self.inside = []
