"""The state of a Keras optimizer on the ps tasks: brought to the chief for a file, and back when one was loaded."""

from __future__ import annotations

import base64
import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord, Shard
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.variables import find_record

ITERATIONS = "iterations"


def slot_variables(optimizer: Any, variable: Any) -> dict[str, Any]:
    """The variables that a Keras optimizer keeps for one variable, or for all, by the names of its attributes.

    Keras' names of these variables do not tell them apart in every optimizer. Its optimizers hold them in lists with an
    entry for each variable of the model (``_momentums``), or alone (``_u_product`` of Nadam).

    Args:
        optimizer: built.
        variable: one of those that it was built for.
    """
    of_all = {id(optimizer.iterations), id(optimizer._learning_rate)}
    own = {id(v) for v in optimizer.variables} - of_all
    known = [id(v) for v in optimizer._trainable_variables]
    place = known.index(id(variable)) if id(variable) in known else None
    found = {}
    for name, value in vars(optimizer).items():
        if id(value) in own:
            found[name] = value
        elif place is not None and isinstance(value, list) and len(value) == len(known) and id(value[place]) in own:
            found[name] = value[place]
    return found


# ---- on a server ----------------------------------------------------------------------------------------------------


def tell_slots(table: VariableTable, rule: int, number: int) -> dict[str, Any]:
    """What an optimizer keeps for one variable of this server, as text."""
    if rule not in table.rules:
        return {"slots": ""}
    file = io.BytesIO()
    slots = table.rules[rule].slots(table.variable(number).parameter)
    torch.save({name: value.detach().clone() for name, value in slots.items()}, file)
    return {"slots": base64.b64encode(file.getvalue()).decode()}


def take_slots(table: VariableTable, rule: int, number: int, slots: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Gives an optimizer what it is to keep for one variable of this server."""
    table.rules[rule].put_slots(table.variable(number).parameter, slots)
    table.calls += 1
    return {}


# ---- on the chief ---------------------------------------------------------------------------------------------------


class StateOnServers:
    """The chief's view of the state that the servers keep for an optimizer.

    Args:
        strategy: whose servers.
        optimizer: what the servers know it as.
        source: the Keras optimizer of the model, in the chief's program.
        variables: the model's trainable variables.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, optimizer: Any, source: Any, variables: Sequence[Any]
    ) -> None:
        self._strategy, self._optimizer = strategy, optimizer
        self._source, self._variables = weakref.ref(source), list(variables)
        self._known: list[tuple[int, int]] | None = None

    def bring(self) -> None:
        """Puts the servers' state into the chief's optimizer, e.g. for a file."""
        source, rule = self._source(), self._strategy.known_optimizer_number(self._optimizer)
        if source is None or rule is None or not source.built:
            return
        for variable, record in self._records():
            own = slot_variables(source, variable)
            told = [self._ask(shard, rule) for shard in record.shards]
            for name, slot in own.items():
                parts = [slots[name] for slots in told if name in slots]
                if len(parts) == len(told) and _fits(slot, record):
                    slot.assign(parts[0] if slot.value.dim() == 0 or len(parts) == 1 else torch.cat(parts))
            steps = max((int(slots[ITERATIONS]) for slots in told if ITERATIONS in slots), default=0)
            if steps > int(source.iterations):  # functions of the user's own count there alone
                source.iterations.assign(steps)
        self._known = self._stamps(source)

    def send_if_loaded(self) -> None:
        """Gives the servers the chief's state if it is not what they have: a file was loaded, or it trained before."""
        source = self._source()
        if source is None:
            return
        now = self._stamps(source)
        before, self._known = self._known, now
        if now == before or (before is None and int(source.iterations) == 0):
            return
        rule, count = self._strategy.optimizer_number(self._optimizer), source.iterations.value.detach().cpu()
        for variable, record in self._records():
            slots = slot_variables(source, variable)
            own = {name: v.value.detach().cpu() for name, v in slots.items() if _fits(v, record)}
            for shard in record.shards:
                rows = slice(shard.start, shard.start + shard.rows)
                cut = {name: v[rows].clone() if v.dim() and len(record.shards) > 1 else v for name, v in own.items()}
                self._call(shard.server, take_slots, rule, shard.number, {**cut, ITERATIONS: count})

    def _records(self) -> list[tuple[Any, RemoteRecord]]:
        found = [(variable, find_record(variable.value)) for variable in self._variables]
        return [(variable, record) for variable, record in found if isinstance(record, RemoteRecord)]

    def _stamps(self, source: Any) -> list[tuple[int, int]]:
        """Change when a slot of the chief's optimizer is written to."""
        of_all = (source.iterations, source._learning_rate)
        slots = [v.value for v in source.variables if not any(v is known for known in of_all)]
        return [(id(value), torch_internals.version_of(value)) for value in slots]

    def _ask(self, shard: Shard, rule: int) -> dict[str, torch.Tensor]:
        text = self._call(shard.server, tell_slots, rule, shard.number)["slots"]
        if not text:
            return {}
        slots: dict[str, torch.Tensor] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
        return slots

    def _call(self, server: int, function: Any, *args: Any) -> dict[str, Any]:
        return self._strategy.servers.call(server, {"method": "apply"}, pickling.dumps((function, args)))


def _fits(slot: Any, record: RemoteRecord) -> bool:
    """Whether a slot can be divided as its variable is: not so with Adafactor's sums over columns."""
    shape = slot.value.shape
    return len(record.shards) == 1 or len(shape) == 0 or shape == record.components[0].shape


# ---- files ----------------------------------------------------------------------------------------------------------

_states: weakref.WeakKeyDictionary[Any, StateOnServers] = weakref.WeakKeyDictionary()


def state_of(
    strategy: ParameterServerStrategy, optimizer: Any, source: Any, variables: Sequence[Any]
) -> StateOnServers:
    """The servers' state of an optimizer; from now on files get it from there. Arguments as for the class."""
    known = _states.get(source)
    if known is None:
        known = _states[source] = StateOnServers(strategy, optimizer, source, variables)
    return known


def install() -> None:
    """Lets Keras' files hold what the servers have."""
    wrap(keras.optimizers.Optimizer, "save_own_variables", _save_own_variables)


def _save_own_variables(original: Callable[[Any, Any], None], optimizer: Any, store: Any) -> None:
    """As Keras', after the ps tasks were asked."""
    state = _states.get(optimizer)
    if state is not None:
        state.bring()
    original(optimizer, store)
