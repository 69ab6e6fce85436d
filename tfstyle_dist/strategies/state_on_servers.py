"""``state_dict`` and ``load_state_dict`` of a ``torch.optim`` optimizer whose state the parameter servers hold."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.parameter_server.client import optimizer_slots
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.variables.known_tensors import find_record

if TYPE_CHECKING:
    from tfstyle_dist.strategies.parameter_server import ParameterServerStrategy


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
        optimizer_slots.send(strategy.servers, number, optimizer, _records(optimizer))

    def filled(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        strategy = reference()
        if strategy is None or optimizer_slots.stays_there():
            return None
        strategy.send_hyperparameters()
        slots, counted = optimizer_slots.fetch(strategy.servers, number, _records(optimizer))
        groups = [{**here, **there} for here, there in zip(state["param_groups"], counted, strict=True)]
        return {**state, "state": {place: found for place, found in enumerate(slots) if found}, "param_groups": groups}

    def loaded(optimizer: torch.optim.Optimizer) -> None:
        strategy = reference()
        if strategy is None or optimizer_slots.stays_there():
            return
        optimizer_slots.send(strategy.servers, number, optimizer, _records(optimizer))
        strategy.sent_hyperparameters.pop(optimizer, None)
        strategy.send_hyperparameters()

    optimizer.register_state_dict_post_hook(filled)
    optimizer.register_load_state_dict_post_hook(loaded)


def _records(optimizer: torch.optim.Optimizer) -> list[RemoteRecord]:
    found = [find_record(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return [record for record in found if isinstance(record, RemoteRecord)]
