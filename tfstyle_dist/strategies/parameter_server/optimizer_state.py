"""``optimizer.state`` in the coordinator's program, where parameter servers hold the state."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.parameter_server.client import optimizer_slots
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.variables.known_tensors import find_record

if TYPE_CHECKING:
    from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy


def keep_on_servers(strategy: ParameterServerStrategy, optimizer: Any, number: int) -> None:
    """In the coordinator's program: what an optimizer has in its state goes to the servers, now and when it is loaded.

    Args:
        strategy: of its parameters.
        optimizer: any; one that is not of ``torch.optim`` tells its state itself.
        number: under which the servers know it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    optimizer._opt_called = True  # type: ignore[attr-defined]  # workers step it: a scheduler must not think nobody has
    reference = weakref.ref(strategy)
    if optimizer_slots.begins_with_state(optimizer):
        optimizer_slots.send(strategy.servers, number, _owned(optimizer), optimizer.state)
    optimizer.state = ServerState(strategy, number, optimizer)

    def filled(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        strategy = reference()
        owned = _owned(optimizer)
        if strategy is None or optimizer_slots.stays_there() or not owned:  # a copy of the optimizer has none
            return None
        strategy.send_hyperparameters()
        counted = optimizer_slots.counted_in_groups(strategy.servers, number, owned[0][0])
        groups = [{**here, **there} for here, there in zip(state["param_groups"], counted, strict=True)]
        return {**state, "param_groups": groups}

    def loaded(optimizer: torch.optim.Optimizer) -> None:
        strategy = reference()
        if strategy is None or not _owned(optimizer):
            return
        if not optimizer_slots.stays_there():
            optimizer_slots.send(strategy.servers, number, _owned(optimizer), optimizer.state)
        optimizer.state = ServerState(strategy, number, optimizer)
        if not optimizer_slots.stays_there():
            strategy.sent_hyperparameters.pop(optimizer, None)
            strategy.send_hyperparameters()

    optimizer.register_state_dict_post_hook(filled)
    optimizer.register_load_state_dict_post_hook(loaded)


_UNKNOWN = [("", None, -1)]
"""What the servers had is not known: whatever is there now goes to them."""


def _asking(name: str) -> Any:
    """The method of a dict for one of its keys, after the servers were asked for that; what it deletes, they forget."""

    def method(state: ServerState, key: Any, *rest: Any) -> Any:
        record = find_record(key)
        if isinstance(record, RemoteRecord):
            state._get(record, key)
        return getattr(defaultdict, name)(state, key, *rest)

    return method


def _asking_all(name: str) -> Any:
    """The same for a method about all keys."""

    def method(state: ServerState) -> Any:
        for record, parameter in state._owned():
            state._get(record, parameter)
        return getattr(defaultdict, name)(state)

    return method


class ServerState(defaultdict[Any, Any]):
    """What the servers keep for each parameter: reading asks them, and what is written goes to them.

    An entry that the program has not changed is asked for at each use, as the servers go on, and stays the same object
    until the next function is scheduled. Changes are sent then, and before a checkpoint is written (``send_changes``).

    Args:
        strategy: of the parameters.
        number: of the optimizer.
        optimizer: whose state it is.
    """

    def __init__(self, strategy: ParameterServerStrategy, number: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(dict)
        self._strategy, self._number = weakref.ref(strategy), number
        self._optimizer = weakref.ref(optimizer)
        self._told: dict[int, list[tuple[str, Any, int]]] = {}  # by id of the parameter: what was got
        self._former: list[tuple[weakref.ref[torch.Tensor], int]] = []  # what a program may have kept, and its version
        self.makes_step = False

    def send_changes(self) -> None:
        """The servers get what the program has written; entries that are got later are the servers' again."""
        self.makes_step = False  # one that raised has not ended
        if self._former:
            self._look_at_former()
        if not self._told and not dict.__len__(self):
            return
        strategy, owned = self._strategy(), self._owned()
        with optimizer_slots.state_stays_there():
            changed = [(record, p) for record, p in owned if self._is_changed(p)]
            if changed and strategy is not None:
                optimizer_slots.send(
                    strategy.servers, self._number, changed, {p: dict.get(self, p) for _, p in changed}
                )
        self._forget(owned)

    def begin_step(self) -> None:
        """``step()`` in the coordinator's program: the servers make it, and what it does here is none of theirs."""
        self.send_changes()
        self.makes_step = True

    def end_step(self) -> None:
        """The servers have made the step."""
        self._forget(self._owned())
        self.makes_step = False

    def _forget(self, owned: list[tuple[RemoteRecord, torch.Tensor]]) -> None:
        for _, parameter in owned:
            entry = dict.pop(self, parameter, None) or {}
            tensors = [value for value in entry.values() if isinstance(value, torch.Tensor)]
            self._former += [(weakref.ref(value), torch_internals.version_of(value)) for value in tensors]
        self._told.clear()

    def _look_at_former(self) -> None:
        kept = [(tensor, version) for known, version in self._former if (tensor := known()) is not None]
        if any(torch_internals.version_of(tensor) != version for tensor, version in kept):
            warn_once(
                "a former entry of a state",
                "The program wrote to a tensor that it had got from optimizer.state before it scheduled a function: "
                "that is lost, as the servers have gone on. Get optimizer.state[parameter] again after join().",
            )
        self._former = [(weakref.ref(tensor), torch_internals.version_of(tensor)) for tensor, _ in kept]

    def _owned(self) -> list[tuple[RemoteRecord, torch.Tensor]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else _owned(optimizer)

    def _is_changed(self, parameter: Any) -> bool:
        told, now = self._told.get(id(parameter)), dict.get(self, parameter)
        if told is None:  # an empty entry is what reading has made
            return bool(now)
        return now is None or told != _as_told(now)

    def _get(self, record: RemoteRecord, parameter: Any) -> None:
        strategy = self._strategy()
        if strategy is None or strategy.closed or self.makes_step or optimizer_slots.stays_there():
            return
        if self._is_changed(parameter):
            return
        slots = optimizer_slots.fetch(strategy.servers, self._number, record)
        if not slots:
            dict.pop(self, parameter, None)
            self._told.pop(id(parameter), None)
            return
        entry = dict.setdefault(self, parameter, {})
        _refresh(entry, slots)
        self._told[id(parameter)] = _as_told(entry)

    # ---- as a dict --------------------------------------------------------------------------------------------------

    __getitem__, __delitem__, __contains__ = _asking("__getitem__"), _asking("__delitem__"), _asking("__contains__")
    get, pop = _asking("get"), _asking("pop")
    __iter__, __len__, clear = _asking_all("__iter__"), _asking_all("__len__"), _asking_all("clear")
    keys, values, items = _asking_all("keys"), _asking_all("values"), _asking_all("items")

    def __missing__(self, key: Any) -> Any:
        made: dict[str, Any] = {}
        dict.__setitem__(self, key, made)
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        self._told.setdefault(id(key), _UNKNOWN)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """See ``dict``."""
        return self[key] if key in self else super().setdefault(key, default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(list(self.items()))


def send_state(optimizer: Any) -> None:
    """The servers get what the program has written to the state of an optimizer; others have nothing to send."""
    state = getattr(optimizer, "state", None)
    if isinstance(state, ServerState):
        state.send_changes()


def _refresh(entry: dict[str, Any], slots: Mapping[str, Any]) -> None:
    """Gives an entry the present slots; tensors that fit stay the same objects, as the program may hold them."""
    for name in [name for name in entry if name not in slots]:
        del entry[name]
    for name, value in slots.items():
        old: Any = entry.get(name)
        tensors = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
        if tensors and old.shape == value.shape and old.dtype is value.dtype:
            old.copy_(value)
        else:
            entry[name] = value


def _as_told(slots: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
    """Differs when something in an entry was changed, or is another object."""
    return [
        (name, id(value), torch_internals.version_of(value))
        if isinstance(value, torch.Tensor)
        else (name, copy.deepcopy(value), 0)
        for name, value in slots.items()
    ]


def _owned(optimizer: torch.optim.Optimizer) -> list[tuple[RemoteRecord, torch.Tensor]]:
    """The parameters that are on the servers, in the order of the groups."""
    found = [(find_record(p), p) for group in optimizer.param_groups for p in group["params"]]
    return [(record, parameter) for record, parameter in found if isinstance(record, RemoteRecord)]
