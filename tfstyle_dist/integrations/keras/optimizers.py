"""Keras optimizers in replica context: gradients become one over all replicas, then every worker updates once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.integrations.keras import server_optimizer
from tfstyle_dist.integrations.keras.backend import keras, outside_stateless_scope
from tfstyle_dist.integrations.keras.share import CURRENT
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import Frame, current_replica, entered
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.reductions import reduce_columns
from tfstyle_dist.variables import find_record

Apply = Callable[..., Any]
Payload = tuple[list[Any], int | None]


def install() -> None:
    """Lets ``apply`` of every Keras optimizer ask which replica calls it."""
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        wrap(kind, "apply", _apply)


def _apply(original: Apply, self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
    replica = current_replica()
    variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
    if CURRENT.push is None and server_optimizer.is_remote(variables):
        server_optimizer.push(self, list(grads), variables)
        return None
    if CURRENT.push is None and (replica is None or replica.num_replicas_in_sync == 1):
        return original(self, grads, trainable_variables)
    if len(grads) != len(variables):
        raise ValueError(
            f"{self.name}.apply got {len(grads)} gradients for {len(variables)} variables; give one gradient for each, "
            "None where there is none."
        )
    if CURRENT.push is not None:
        CURRENT.push(self, grads, variables)
        return None
    assert replica is not None
    strategy = cast(Strategy, replica.strategy)
    claim(strategy, variables, grads)
    what = f"{type(self).__name__}.apply"  # Keras numbers the names of optimizers, anew on each worker

    def joint(payloads: list[Payload]) -> list[None]:
        total = reduced(strategy, variables, payloads, f"{what} of {len(variables)} variables")
        with entered(Frame(strategy)), outside_stateless_scope(), torch.no_grad():
            original(self, total, variables)
        return [None] * len(payloads)

    return replica.barrier(what, (list(grads), CURRENT.count), joint)


def claim(strategy: Strategy, variables: Sequence[Any], grads: Sequence[Any] = ()) -> None:
    """From now on the Keras optimizer makes these variables' gradients one, not ``backward()``.

    Raises:
        RuntimeError: a gradient was reduced by ``backward()`` already, or a variable that the strategy does not own.
    """
    for place, variable in enumerate(variables):
        value = variable.value
        record = find_record(value)
        if record is None or record.store is not strategy.parameter_store:
            if strategy.worker.num_local_replicas == 1:
                continue
            raise RuntimeError(
                f"The optimizer updates {variable.path!r}, which does not belong to {strategy!r}, so its local "
                "replicas would share one gradient. Build the model in strategy.scope()."
            )
        if record.policy is None or record.policy.reduce_at != "backward":
            continue
        reduced_already = (
            bool(grads) and grads[place] is not None and any(grads[place] is c.grad for c in record.components)
        )
        # The replicas' gradients are equal means by now, and so is what is made of them: the first step is right too.
        if reduced_already and record.policy.scale is not ReduceOp.MEAN:
            raise RuntimeError(
                f"apply was given the gradient of {variable.path!r} that backward() has averaged over the replicas "
                "already. Compile the model in the scope, or call strategy.set_gradient_policy(reduce_at='apply') "
                "before the first backward()."
            )
        record.policy.reduce_at = "apply"


@contextmanager
def claims_of(model: Any) -> Iterator[None]:
    """What ``claim`` does to a model's weights inside holds inside: a loop with an optimizer of torch may follow.

    Args:
        model: of Keras.
    """
    before = {id(policy) for policy in _policies_of_apply(model)}
    try:
        yield
    finally:
        for policy in _policies_of_apply(model):
            if id(policy) not in before:
                policy.reduce_at = "backward"


def _policies_of_apply(model: Any) -> list[Any]:
    records = [find_record(v._value) for v in model.trainable_variables if v._value is not None]
    policies = [record.policy for record in records if record is not None and record.policy is not None]
    return [policy for policy in policies if policy.reduce_at == "apply"]


def reduced(
    strategy: Strategy, variables: Sequence[Any], payloads: Sequence[Payload], name: str
) -> list[torch.Tensor | None]:
    """The gradients of all replicas of all workers as one.

    In ``fit`` each replica's gradient is that of a mean over its own examples, so it weighs as much as its examples:
    the result is the gradient of the mean over the global batch. Elsewhere they are summed, as in TensorFlow.

    Args:
        strategy: whose replicas.
        variables: what the gradients are for.
        payloads: of each local replica its gradients, ``None`` where there is none, and its examples.
        name: for messages.
    """
    weighted = payloads[0][1] is not None
    devices = [strategy.worker.torch_device(r) for r in range(len(payloads))]
    examples = [1 if count is None else count for _, count in payloads]
    columns: list[list[torch.Tensor]] = []
    flags: list[float] = []
    for place, variable in enumerate(variables):
        column, used = [], False
        for (grads, _), count, device in zip(payloads, examples, devices, strict=True):
            grad = grads[place]
            if grad is None or count == 0:
                column.append(torch.zeros(variable.value.shape, dtype=variable.value.dtype, device=device))
                continue
            grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            column.append(grad * count if weighted else grad)
            used = True
        columns.append(column)
        flags.append(float(used))
    told = torch.tensor([float(sum(examples)), *flags])
    columns.append([(told if r == 0 else torch.zeros_like(told)).to(device) for r, device in enumerate(devices)])
    sums = reduce_columns(strategy, ReduceOp.SUM, columns, name)
    total, *used_by = sums.pop().tolist()
    divisor = total if weighted else 1.0
    return [s / divisor if n else None for s, n in zip(sums, used_by, strict=True)]
