"""The TF-style optimizer interface: gradients are SUMMED over the replicas in ``apply_gradients``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.runtime.clocks import COMMUNICATION, UPDATE
from tfstyle_dist.runtime.context import Frame, current_replica, entered
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.contexts import get_strategy
from tfstyle_dist.train import local_updates
from tfstyle_dist.train.gradients import gradients, trainable_variables_of
from tfstyle_dist.train.pairs import check_step, losses_of, pairs_of, union, variables_of
from tfstyle_dist.train.shared_rule import SharedRule, is_shared
from tfstyle_dist.train.sums import advance, reduced, value_of
from tfstyle_dist.train.update_rule import UpdateRule
from tfstyle_dist.values import PerReplica
from tfstyle_dist.variables import Record, find_record
from tfstyle_dist.variables.record import Placement

GradsAndVars = Sequence[tuple[Any, Any]]


class TFOptimizer(UpdateRule):
    """Base of the optimizers of ``tf.compat.v1.train``.

    In replica context ``apply_gradients`` sums the gradients over all replicas and updates once, so scale the loss
    by the global batch (``nn.compute_average_loss``). Parameters it has seen are no longer reduced by ``backward()``.

    Example:
        >>> optimizer = GradientDescentOptimizer(learning_rate=0.1)
        >>> w = Variable(3.0)
        >>> optimizer.minimize(lambda: w * w, var_list=[w])
    """

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._shared_rule: SharedRule | None = None

    def get_name(self) -> str:
        """The name given at construction."""
        return self._name

    # ---- gradients --------------------------------------------------------------------------------------------

    @untraced
    def compute_gradients(
        self,
        loss: torch.Tensor | Callable[[], torch.Tensor],
        var_list: Iterable[torch.Tensor] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: torch.Tensor | None = None,
    ) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """The gradients of ``loss``, local to the calling replica.

        Args:
            loss: a tensor, a list of tensors, or a function returning one.
            var_list: parameters or variables; default: the trainable ones that the loss depends on.
            gate_gradients: accepted for TF's signature.
            aggregation_method: how the parts of several losses are summed, an ``AggregationMethod``.
            colocate_gradients_with_ops: accepted for TF's signature.
            grad_loss: weight of the loss, of its shape.

        Returns:
            Pairs of gradient (``None`` where unconnected) and variable.

        Raises:
            TypeError: a loss that is no tensor, or a ``var_list`` of something else.
            ValueError: an unknown method, or a loss that depends on nothing trainable.
        """
        losses = losses_of(loss)
        variables = union(map(trainable_variables_of, losses)) if var_list is None else variables_of(var_list)
        if not variables:
            raise ValueError(
                "compute_gradients found no trainable variable that the loss depends on. Compute the loss from "
                "parameters that require gradients, or give var_list."
            )
        self._claim(variables, ())
        found = gradients(
            losses,
            variables,
            None if grad_loss is None else [grad_loss] * len(losses),
            aggregation_method=aggregation_method,
        )
        return list(zip(found, variables, strict=True))

    @untraced
    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        aggregation_method: int | None = None,
    ) -> None:
        """Sums the gradients over all replicas and updates the variables.

        Args:
            grads_and_vars: pairs as ``compute_gradients`` gives them; every replica must list the same variables.
            global_step: a variable that is increased by one, if given.
            name: accepted for TF's signature.
            skip_gradients_aggregation: each replica applies its own gradients to its own copy, for those who have
                reduced them with ``all_reduce``; in replica context only. Copies of other gradients drift apart.
            aggregation_method: how the replicas' contributions are summed, an ``AggregationMethod``.

        Raises:
            TypeError: no pairs of gradient and variable.
            InvalidArgumentError: a gradient of another shape than its variable.
            ValueError: no pairs at all, no gradient at all, an unknown method, or ``skip_gradients_aggregation`` in
                cross-replica context.
            NotImplementedError: ``skip_gradients_aggregation`` where several processes share one copy, or where the
                replicas have one copy and give different gradients.
            RuntimeError: a variable belongs to another strategy, or its gradient was reduced by ``backward()`` already.
        """
        method = AggregationMethod.validate(aggregation_method)
        pairs = pairs_of(grads_and_vars, f"{self._name}.apply_gradients")
        check_step(global_step)
        replica, strategy = current_replica(), get_strategy()
        if (contents := strategy.parameter_store.contents) is not None:
            contents.take(self)  # also one that the step function named nowhere one could look
        self._check(strategy, [v for _, v in pairs])
        self._claim([v for _, v in pairs], [g for g, _ in pairs])
        if replica is None or (strategy.num_replicas_in_sync == 1 and strategy.parameter_store.contents is None):
            if skip_gradients_aggregation and strategy.num_replicas_in_sync > 1:
                raise ValueError(
                    "apply_gradients(skip_gradients_aggregation=True) in cross-replica context: which copy gets which "
                    "gradient is not defined there. Call it in the function that strategy.run calls."
                )
            self._apply_in_cross_replica_context(strategy, pairs, method)
        elif skip_gradients_aggregation and strategy.num_replicas_in_sync > 1:
            local_updates.apply_own(self, strategy, replica, pairs)
        else:

            def joint(payloads: list[list[tuple[Any, Any]]]) -> list[None]:
                with entered(Frame(strategy)):
                    self._reduce_and_update(strategy, payloads, method)
                return [None] * len(payloads)

            replica.barrier(f"{self._name}.apply_gradients", pairs, joint)
        if global_step is not None:
            advance(global_step, replica)

    def minimize(
        self,
        loss: torch.Tensor | Callable[[], torch.Tensor],
        global_step: Any = None,
        var_list: Iterable[torch.Tensor] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: torch.Tensor | None = None,
    ) -> None:
        """``compute_gradients`` and ``apply_gradients`` in one call.

        Args:
            loss: as for ``compute_gradients``.
            global_step: as for ``apply_gradients``.
            var_list: as for ``compute_gradients``.
            gate_gradients: as for ``compute_gradients``.
            aggregation_method: as for both.
            colocate_gradients_with_ops: as for ``compute_gradients``.
            name: as for ``apply_gradients``.
            grad_loss: as for ``compute_gradients``.

        Raises:
            Exception: as ``compute_gradients`` and ``apply_gradients``.
        """
        pairs = self.compute_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        )
        self.apply_gradients(pairs, global_step, name, aggregation_method=aggregation_method)

    # ---- joint work -------------------------------------------------------------------------------------------

    def _apply_in_cross_replica_context(self, strategy: Strategy, pairs: list[tuple[Any, Any]], method: int) -> None:
        count = strategy.worker.num_local_replicas
        if any(isinstance(g, PerReplica) for g, _ in pairs):
            columns = [[(g.values[r] if isinstance(g, PerReplica) else g, v) for g, v in pairs] for r in range(count)]
            self._reduce_and_update(strategy, columns, method)
            return
        self._update([(g, v) for g, v in pairs if g is not None])

    def _reduce_and_update(self, strategy: Strategy, payloads: list[list[tuple[Any, Any]]], method: int) -> None:
        variables = local_updates.same_variables(payloads)
        columns = [[value_of(p[i][0]) for p in payloads] for i in range(len(variables))]
        self._update(reduced(f"{self._name}.apply_gradients", strategy, variables, columns, method))

    def _update(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> None:
        if not pairs:
            raise ValueError(
                "No gradients provided for any variable: all are None. Does the loss depend on the variables?"
            )
        with get_strategy().worker.clocks[0].counting(UPDATE):
            self.update_variables(pairs)

    def update_variables(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> None:
        """One step with summed gradients, the same on all workers; at least one pair."""
        if self._push(pairs):
            return
        self.begin_step()
        shared = [(g, v) for g, v in pairs if is_shared(v)]
        if shared:
            self._shared_rule = self._shared_rule or SharedRule(self, [v for _, v in shared])
            self._shared_rule.apply(shared, self._slots)
        with torch.no_grad():
            for grad, variable in pairs if not shared else [(g, v) for g, v in pairs if not is_shared(v)]:
                self._update_one(grad, variable)

    def _push(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> bool:
        """Gives the gradients to the parameter servers, if that is where the variables live."""
        records = [find_record(v) for _, v in pairs]
        remote = [r for r in records if r is not None and r.placement is Placement.REMOTE]
        if not remote:
            return False
        if len(remote) != len(pairs):
            raise RuntimeError(
                f"{self._name}.apply_gradients mixes {len(remote)} variables on parameter servers with "
                f"{len(pairs) - len(remote)} others. Use one optimizer for each."
            )
        strategy = remote[0].store.strategy
        with strategy.worker.clocks[0].counting(COMMUNICATION):
            strategy.push_gradients(self, list(zip(remote, [g for g, _ in pairs], strict=True)))
        return True

    def update_parameters(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """One step over plain parameters; what a parameter server calls with the gradients it was sent."""
        self.begin_step()
        with torch.no_grad():
            for grad, parameter in pairs:
                self._update_one(grad, parameter)

    def without_slots(self) -> dict[str, Any]:
        """The settings alone; the slots live beside the variables."""
        return {**self.__dict__, "_slots": {}, "copy_slots": {}, "_shared_rule": None}

    def _update_one(self, grad: torch.Tensor, variable: Any) -> None:
        record = find_record(variable)
        if record is not None and id(variable) in self.copy_slots:
            for replica in range(len(record.components)):
                local_updates.update_copy(self, grad, variable, replica)
            record.changes += 1
            return
        # A divided one is updated at once, not each worker's part by itself.
        own = None if record is None or record.placement is Placement.SHARDED else record
        target = (value_of(variable) if own is None else own.first()).detach()
        others = [] if record is None or record.kind != "variable" else record.copies()[1:]
        before = target.clone() if others else target
        self.update_tensor(target, grad, self.slots_of(variable))
        if record is not None:
            record.changes += 1
        for other in others:
            old, new = before.to(other.device), target.to(other.device)
            if not (other.is_cpu and torch.equal(other, old)):  # it has drifted, or is on a GPU: asking would wait
                new = torch.where(other == old, new, other + (new - old))
            other.copy_(new)
            local_updates.constrain(variable, other)
        local_updates.constrain(variable, target)

    # ---- ownership --------------------------------------------------------------------------------------------

    def _check(self, strategy: Strategy, variables: Sequence[Any]) -> None:
        for variable in variables:
            record = find_record(variable)
            owner = None if record is None else record.store.strategy
            if owner is not None and owner is not strategy and owner.num_replicas_in_sync > 1:
                raise RuntimeError(
                    f"Mixing different tf.distribute strategies: apply_gradients updates a variable of {owner!r} while "
                    f"{strategy!r} is in force. Call it inside the run (or scope) of the variable's own strategy."
                )

    def _claim(self, variables: Sequence[Any], grads: Sequence[Any]) -> None:
        """From now on this optimizer reduces these gradients, not ``backward()``."""
        for place, variable in enumerate(variables):
            record = find_record(variable)
            if record is None or record.policy is None or record.policy.reduce_at != "backward":
                continue
            if grads and grads[place] is not None and _is_own_grad(record, grads[place]):
                raise RuntimeError(
                    f"apply_gradients was given the .grad of {record.describe()!r}, which backward() has already "
                    "reduced over the replicas; summing it again would scale it wrongly. Use compute_gradients(loss), "
                    "or call strategy.set_gradient_policy(parameters, reduce_at='apply') before the first backward()."
                )
            record.policy.reduce_at = "apply"


def _is_own_grad(record: Record, grad: Any) -> bool:
    if record.store.worker.num_replicas == 1:
        return False
    return any(c.grad is not None and c.grad is grad for c in record.components)
