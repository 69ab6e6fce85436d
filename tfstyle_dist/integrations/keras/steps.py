"""``train_function``, ``test_function`` and ``predict_function`` of a Keras model over all replicas."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.input.grouping import group
from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.input.sharding import Layout, steps_of_batch
from tfstyle_dist.input.split import leading_size, map_leaves, slice_batch
from tfstyle_dist.integrations.keras import metric_state
from tfstyle_dist.integrations.keras.assigned import StepScope, assign_on_all
from tfstyle_dist.integrations.keras.backend import every_variable, keras, process_seeds, seeds_of
from tfstyle_dist.integrations.keras.logs import as_number, as_tensor, own_values
from tfstyle_dist.integrations.keras.optimizers import claim
from tfstyle_dist.integrations.keras.outside import Outside
from tfstyle_dist.integrations.keras.random_numbers import RandomNumbers
from tfstyle_dist.integrations.keras.refusals import refuse_stateful
from tfstyle_dist.integrations.keras.share import CURRENT, Ledger
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.replica_context import ReplicaContext
from tfstyle_dist.values import Share, cut_evenly, note_batch, share_of_arguments
from tfstyle_dist.variables.content.copies import move_in_place
from tfstyle_dist.variables.first_values import in_messages

Pairs = list[tuple[Any, torch.Tensor]]

# The variables of each model, its metrics and optimizer that have been made equal on all workers. A number alone would
# not do: a variable of another metric may get the number of one that is gone, on some of the workers.
_shared: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class Steps:
    """The steps of one ``fit``, ``evaluate`` or ``predict``.

    Each replica runs the model's own ``train_step``, ``test_step`` or ``predict_step`` on its share of the global
    batch, in a ``StatelessScope``: what it changes besides the weights becomes one over all replicas afterwards.

    Args:
        strategy: whose replicas.
        model: a Keras model; it is built by the time of the first step.

    Attributes:
        outside: the variables that steps read and the model does not have.
    """

    def __init__(self, strategy: Strategy, model: Any) -> None:
        self.strategy, self.model = strategy, model
        self._ledgers: dict[bool, Ledger] = {}
        self._seeds: Any = None
        self._random = RandomNumbers(strategy)
        self.outside = Outside(strategy, model)
        self._ready = False

    def prepare(self) -> None:
        """Makes the built model the strategy's: its variables equal on all workers and reduced by the optimizer."""
        if self._ready:
            return
        self._ready = True
        refuse_stateful(self.model, self.strategy.num_replicas_in_sync)  # what the model makes as it is built
        self._seeds = process_seeds()
        adopt(self.strategy, self.model)

    def train(self, data: Any) -> Any:
        """One training step on a global batch; the logs are those of all replicas together."""
        return self._step(data[0], self.model.train_step, training=True)

    def test(self, data: Any) -> Any:
        """One evaluation step on a global batch."""
        with torch.no_grad():
            return self._step(data[0], self.model.test_step, training=False)

    def predict(self, data: Any) -> Any:
        """The outputs for a global batch, in its order, on every worker."""
        if not self._ready and not all(layer.built for layer in self.model._flatten_layers()):
            with torch.no_grad():
                self.model.predict_step(usable(self.strategy.experimental_local_results(data[0])[0])[1])
        self.prepare()
        first: list[StepScope] = []

        def replica(batch: Any) -> Any:
            count, batch = usable(batch)
            context = self._replica()
            with self._context(), StepScope([], context.replica_id) as scope, torch.no_grad():
                outputs = self.model.predict_step(batch)
            if context.local_replica_id == 0:
                first.append(scope)
            return keras.tree.map_structure(lambda t: t[:count].detach(), outputs), torch.tensor([count])

        with self._random.of_this_worker(), metric_state.untouched(self.strategy):
            told = self.strategy.run(replica, args=(data[0],))
        first[0].advance_seeds(self.strategy.worker)
        outputs, counts = self.strategy.gather(told, axis=0)
        worker = self.strategy.worker
        if worker.group.size == 1 or worker.num_local_replicas == 1:
            return outputs
        return keras.tree.map_structure(lambda t: _in_order(t, counts.tolist(), worker.group.size), outputs)

    # ---- one step ---------------------------------------------------------------------------------------------

    def _step(self, batch: Any, function: Any, training: bool) -> Any:
        self.prepare()
        if training not in self._ledgers:
            self._ledgers[training] = Ledger(self.model, training, [self._seeds.state])
        ledger, keys = self._ledgers[training], []  # type: Ledger, list[str]
        begun = self._begun(ledger, batch)
        first: list[StepScope] = []

        def replica(batch: Any) -> torch.Tensor:
            context = self._replica()
            before, CURRENT.assign = CURRENT.assign, partial(assign_on_all, context)
            local = context.local_replica_id
            try:
                logs, told, scope = on_replica(
                    batch, function, ledger, context.replica_id, begun[local], self._context(),
                    None if local else self.outside.known,
                )  # fmt: skip
            finally:
                CURRENT.assign = before
            if local == 0:
                keys.extend(logs)
                first.append(scope)
            return told

        with self._random.of_this_worker(), metric_state.untouched(self.strategy):
            told = self.strategy.run(replica, args=(batch,))
        first[0].advance_seeds(self.strategy.worker)
        self.outside.note(first[0].read)
        total = self.strategy.reduce(ReduceOp.SUM, told, axis=None)
        count = float(total[0])
        ledger.settle(total[1 : 1 + ledger.numel], count)
        metrics = own_values(self.model.get_metrics_result())
        if set(keys) == set(ledger.names):
            return metrics
        means = (total[1 + ledger.numel :] / count).view(len(keys), 2).tolist()
        # All replicas say the same of a metric's result, so the mean of what they say is its place.
        return {
            key: metrics[ledger.names[int(place) - 1]] if place >= 1 and place == int(place) else mean
            for key, (mean, place) in zip(keys, means, strict=True)
        }

    def _begun(self, ledger: Ledger, batch: Any) -> list[Pairs]:
        """The values with which each local replica begins; sums are divided among the replicas with examples."""
        worker, begun = self.strategy.worker, []
        for local, part in enumerate(self.strategy.experimental_local_results(batch)):
            share, parts = share_of_arguments([part]), self.strategy.num_replicas_in_sync
            if share is not None and share.division is not None:
                parts = parts - share.division.empty if share.examples else 0
            begun.append(ledger.begin(worker.replica_id(local), parts, worker.torch_device(local)))
        return begun

    def _replica(self) -> ReplicaContext:
        return cast(ReplicaContext, current_replica())

    @contextmanager
    def _context(self) -> Iterator[None]:
        with keras.device(str(self._replica().device)), seeds_of(self._seeds):
            yield


def on_replica(
    batch: Any,
    function: Any,
    ledger: Ledger,
    replica: int,
    mapping: Pairs,
    context: Any = None,
    known: set[int] | None = None,
) -> tuple[dict[str, Any], torch.Tensor, StepScope]:
    """One replica's part of a step.

    Args:
        batch: its share; may be empty, then an example of zeros is computed and counts nothing.
        function: ``train_step`` or ``test_step``.
        ledger: the variables that change.
        replica: its number among all replicas.
        mapping: the values with which the step begins, from ``ledger.begin``.
        context: entered around the step.
        known: see ``StepScope``.

    Returns:
        The logs; the numbers to be summed: the examples, the changes, and for logs that are not just the model's
        metrics each times the examples, with the place of the metric whose result it is; and the scope of the step.
    """
    count, batch = usable(batch)
    with context if context is not None else nullcontext():
        began = [start.clone() for _, start in mapping]
        before, CURRENT.count = CURRENT.count, count
        try:
            with StepScope(mapping, replica, ledger.frozen, known) as scope:
                for variable in ledger.regularized:  # Keras asks the scope for these, not the variable
                    scope.state_mapping[id(variable)] = variable.value
                logs = function(batch)
                if not isinstance(logs, dict):
                    raise TypeError(
                        f"{getattr(function, '__qualname__', function)} returned a {type(logs).__name__}; it must "
                        "return a dict of names and numbers, e.g. self.get_metrics_result()."
                    )
                logs = own_values(logs)
                plain = set(logs) == set(ledger.names)
                places = {} if plain else {name: ledger.source_of(name, as_tensor(v)) for name, v in logs.items()}
        finally:
            CURRENT.count = before
        parts = ledger.changes(scope, began, count, replica)
        device = parts[0].device if parts else torch.device("cpu")
        weighted = []
        for name, place in places.items():  # numbers of the user's own, some of them results of metrics all the same
            numbers = torch.tensor([as_number(logs[name]), float(place)], dtype=torch.float64)
            weighted.append(numbers * count if count else torch.zeros(2))
        parts = [torch.tensor([float(count)], dtype=torch.float64), *parts, *weighted]
        return logs, torch.cat([p.to(device, torch.float64) for p in parts]), scope


def _in_order(gathered: torch.Tensor, counts: Sequence[int], workers: int) -> torch.Tensor:
    """Pieces of a batch go to the workers in turn; here they come worker by worker."""
    pieces = gathered.split(list(counts))
    each = len(pieces) // workers
    return torch.cat([pieces[w * each + r] for r in range(each) for w in range(workers)])


def usable(batch: Any) -> tuple[int, Any]:
    """The number of examples, and the batch; in place of an empty one an example of zeros."""
    count = leading_size(batch)
    batch = tuple(batch) if isinstance(batch, list) else batch
    if count:
        return count, batch
    return 0, map_leaves(lambda leaf: torch.zeros((1, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device), batch)


def divided(strategy: Strategy, batch: Any) -> Any:
    """A global batch that every worker has, cut for this worker's replicas as a distributed dataset does it."""
    batch = keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch)
    worker, size = strategy.worker, leading_size(batch)
    layout = Layout(worker.group.size, worker.group.rank, worker.num_local_replicas)
    ((pieces, _),) = steps_of_batch(size, size, layout, AutoShardPolicy.DATA)
    division = cut_evenly(size, strategy.num_replicas_in_sync)
    moved = []
    for replica, piece in enumerate(pieces):
        part = map_leaves(operator.methodcaller("to", worker.torch_device(replica)), slice_batch(batch, piece))
        note_batch(part, Share(leading_size(part), division))
        moved.append(part)
    return group(moved)


def bring_to(device: torch.device, model: Any) -> None:
    """Moves all variables of a model to a device, wherever Keras has made them."""
    for variable in every_variable(model):
        move_in_place(variable.value, device)


def adopt(strategy: Strategy, model: Any) -> None:
    """Makes a built model's variables the strategy's, wherever they were made."""
    store = strategy.parameter_store
    bring_to(strategy.worker.torch_device(0), model)
    if strategy.adopts_modules:
        for variable in model.variables:
            store.adopt_parameter(variable.value, None, variable.path)
    store.ensure_equal()
    if type(model).train_step is keras.Model.train_step:  # another one may use optimizers of torch: apply claims
        claim(strategy, model.trainable_variables)
    own, known, present = {id(v) for v in model.variables}, _shared.get(model, {}), every_variable(model)
    share_values(strategy, [v for v in present if id(v) not in own and (id(v) not in known or known[id(v)]() is not v)])
    _shared[model] = {id(v): weakref.ref(v) for v in present}


def share_values(strategy: Strategy, variables: Sequence[Any]) -> None:
    """Gives variables the first worker's values, in messages of one dtype; collective."""
    workers = strategy.worker.group
    if workers.size == 1 or not variables:
        return
    device = strategy.worker.torch_device(0)
    by_type: dict[torch.dtype, list[Any]] = {}
    for variable in variables:
        by_type.setdefault(variable.value.dtype, []).append(variable)
    with torch.no_grad():
        for dtype, same in by_type.items():
            left = iter(same)
            for some in in_messages([v.value.detach() for v in same]):
                flat = torch.cat([t.to(device).reshape(-1) for t in some])
                workers.broadcast(flat, 0, f"Keras variables ({dtype})")
                for value, variable in zip(flat.split([t.numel() for t in some]), left, strict=False):
                    variable.assign(value.view(tuple(variable.shape)))
