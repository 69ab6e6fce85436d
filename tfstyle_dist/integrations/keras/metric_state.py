"""Variables of Keras metrics that a step updates in ``strategy.run``: ON_READ with SUM, as Keras declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.integrations.keras import travel
from tfstyle_dist.integrations.keras.assigned import assign_once
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.share import CURRENT, part_of_sum
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import StrategyInForce, current_frame, current_replica
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.strategies.replica_context import ReplicaContext
from tfstyle_dist.variables import DistributedVariable, Placement, Record, VariableComponent, find_record
from tfstyle_dist.variables.component import checked, read_across_replicas, write_component


class MetricState(DistributedVariable):
    """What one variable of a metric holds: of each replica its own part.

    In replica context it is the replica's part; elsewhere the sum over all replicas of all workers, which the workers
    make together at the first reading after a ``run``, so all of them must read. ``assign`` outside of ``run`` sets
    the sum.
    """

    _tfstyle_sum: tuple[int, torch.Tensor] | None
    """The number of runs at which the sum was known, and the sum; alike on all workers."""

    def _tfstyle_value(self) -> torch.Tensor:
        record = self._tfstyle_record
        index = record.index()
        if index is not None:
            return record.components[index]
        known, runs = self._tfstyle_sum, record.store.runs
        if known is None or known[0] != runs:
            known = self._tfstyle_sum = (runs, read_across_replicas(record, self.name))
        return known[1].clone()

    def _assign_in_context(self, op: str, value: Any) -> Any:
        index = self._tfstyle_record.index()
        if index is None:
            self._tfstyle_set_sum(checked(value, self._tfstyle_record.components[0], self.name))
            return self
        self._tfstyle_sum = None
        component = self._tfstyle_record.components[index]
        write_component(component, op, checked(value, component, self.name))
        return self

    def _tfstyle_set_sum(self, total: torch.Tensor) -> None:
        """Divides a value that all workers agree on among the replicas."""
        record = self._tfstyle_record
        worker = record.store.worker
        for replica, component in enumerate(record.components):
            own = part_of_sum(total, worker.replica_id(replica), worker.num_replicas)
            write_component(component, "assign", own)
        self._tfstyle_sum = (record.store.runs, total.clone())


def state_of(strategy: StrategyInForce, variable: Any) -> MetricState:
    """The state of a metric's variable on a strategy's replicas.

    Args:
        strategy: whose replicas.
        variable: of Keras; its present value becomes the sum.
    """
    store, value = strategy.parameter_store, variable._value.detach()
    components: list[torch.Tensor] = []
    for replica, place in enumerate(store.worker.devices):
        component = VariableComponent(value.to(place.torch_device, copy=True), requires_grad=False)
        component._tfstyle_name = variable.path if replica == 0 else f"{variable.path}/replica_{replica}"
        component._tfstyle_device = place.logical
        components.append(component)
    state: Any = torch_internals.make_subclass(MetricState, components[0].detach(), False)
    on_read, add = VariableSynchronization.ON_READ, VariableAggregation.SUM
    record = Record(store, state, components, "variable", on_read, add)
    record.placement, record.local_name = Placement.MIRRORED, variable.path
    state._tfstyle_record, state._tfstyle_trainable = record, False
    state._tfstyle_synchronization, state._tfstyle_constraint = on_read, None
    state._tfstyle_set_sum(components[0].detach().clone())
    return state  # type: ignore[no-any-return]


def adopt(variable: Any, strategy: StrategyInForce) -> None:
    """Gives a metric's variable a part for each replica, once.

    Args:
        variable: of Keras.
        strategy: whose replicas; nothing is done for a single one, and for parameter servers.
    """
    if isinstance(variable._value, MetricState) or variable.aggregation != "sum" or variable._value is None:
        return
    several = strategy.num_replicas_in_sync > 1 and not strategy.worker.group.traces
    if several and not isinstance(strategy, ParameterServerStrategy):
        variable._value = state_of(strategy, variable)


@contextmanager
def untouched(strategy: Strategy) -> Iterator[None]:
    """A ``run`` inside leaves the parts alone, so that the sums stay known.

    Args:
        strategy: whose run it is.
    """
    store = strategy.parameter_store
    before = store.runs
    try:
        yield
    finally:
        store.runs = before


def install() -> None:
    """Lets the variables of metrics belong to the strategy in whose scope they are made, or that first writes them.

    A metric that is updated in a step of the user's own is not changed by a replica without examples: the class of
    every metric that is made from now on knows of shares.
    """
    wrap(keras.Metric, "add_variable", _add_variable)
    wrap(keras.Variable, "_direct_assign", _direct_assign)
    wrap(keras.metrics.Metric, "__init__", _init)


def _add_variable(original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    variable, frame = original(metric, *args, **kwargs), current_frame()
    if frame is not None and frame.replica is None and frame.component is None:
        adopt(variable, frame.strategy)
    return variable


def _direct_assign(original: Callable[..., None], variable: Any, value: Any) -> None:
    if travel.write_on_servers(variable, value):
        return
    replica = current_replica()
    if variable._synchronization == "on_read":
        if replica is not None:
            adopt(variable, replica.strategy)
        if isinstance(variable._value, MetricState):
            if replica is None or CURRENT.count != 0:  # fit invents an example where a replica has none
                variable._value.assign(value)
            return
    if replica is not None and replica.strategy.worker.num_local_replicas > 1 and _is_shared(variable):
        assign_once(cast(ReplicaContext, replica), variable, value)
        return
    original(variable, value)


def _is_shared(variable: Any) -> bool:
    """Whether all replicas of a worker have one value: nobody's, or one of central storage."""
    record = None if variable._value is None else find_record(variable._value)
    return record is None or record.placement is Placement.CENTRAL


def _init(original: Callable[..., None], metric: Any, *args: Any, **kwargs: Any) -> None:
    original(metric, *args, **kwargs)
    for owner in type(metric).__mro__:
        if "update_state" in vars(owner):
            wrap(owner, "update_state", _update_state)


def _update_state(original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    replica = current_replica()
    if replica is None or CURRENT.count is not None:  # fit counts for itself
        return original(metric, *args, **kwargs)
    for variable in metric.variables:  # before a replica reads them; those without examples do it as well
        adopt(variable, replica.strategy)
    share = replica.share
    return None if share is not None and share.examples == 0 else original(metric, *args, **kwargs)
