"""Random programs on parameter servers, whose one worker does a step at a time, train what one device trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import of_their_own
import torch
from objects import Program
from operations import Plan, Step
from oracle import run_by_hand
from shrink import DIFFERS, IMPOSSIBLE, REFUSED, SAME, Outcome, raised
from snapshot import Snapshot, first_difference

import tfstyle_dist as tfd
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner
from tfstyle_dist.parameter_server.local_cluster import LocalCluster

REFUSED_IN_FUNCTIONS = {
    "update_by_hand", "update_data_by_hand", "assign_data_in_step", "clip_weights", "multiply_weights", "load_in_step",
    "multiply_learning_rate", "step_scheduler_in_step", "step_with_momentum_by_hand", "new_optimizer_in_step",
    "step_with_closure", "use_helper", "through_a_vector_in_step", "write_to_aliases_in_step", "flatten_in_step",
    "average_into_teacher_in_step", "update_average_in_step",
}  # fmt: skip
"""What a function of a worker may not do: write to parameters, change settings, make optimizers."""
OF_ONE_PROCESS = {
    "step_optimizer", "train", "zero_to_none", "zero_to_zeros", "clip_gradients", "assign_gradients",
    "freeze_without_gradient", "freeze_or_thaw",
    "multiply_state_in_step", "save_in_step", "new_teacher_in_step", "add_teacher_to_list", "flatten", "multiply_flat",
    "update_flat", "flatten_gradients", "multiply_flat_gradient", "keep_gradient", "write_to_kept_gradient",
    "keep_state", "write_to_kept_state", "write_to_kept_state_in_step", "write_through_data", "set_data",
    "share_memory_of_two", "draw_factor",
}  # fmt: skip
"""What a program does where gradients, optimizers' state or other objects are: on a worker, on a server or in the
coordinator's program, but not in all of them."""
NEW_OBJECTS = {
    "add_group",
    "new_parameter",
    "copy_model",
    "normalize_weight",
    "prune_weight",
    "new_layer",
    "add_hook",
    "remove_hooks",
    "load_by_assigning",
    "to_double_and_back",
}
"""What a program that has scheduled a function does with a new function only, and new optimizers."""


class _Alone:
    """See ``Exchange``: there is one replica."""

    def backward(self, loss: torch.Tensor, program: Program, **options: Any) -> None:
        loss.backward(**options)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return value


def for_servers(plan: Plan) -> Plan:
    """The same without what means something else where there are parameter servers.

    Args:
        plan: of a program.
    """
    plan = plan.without(REFUSED_IN_FUNCTIONS | OF_ONE_PROCESS | NEW_OBJECTS)
    # torch.nn.utils.parametrizations make parameters of parameters, which is refused.
    model = plan.names["model"].replace("reparametrized", "grouped")
    return replace(plan, names={**plan.names, "model": model})


def for_shards(plan: Plan) -> Plan:
    """The same with an optimizer of which each server can compute its part, to the last bit.

    Args:
        plan: what ``for_servers`` gave.
    """
    name = plan.names["optimizer"]
    elementwise = name not in of_their_own.OPTIMIZERS and not name.startswith("fused")
    return replace(
        plan.without({"new_optimizer"}), names={**plan.names, "optimizer": name if elementwise else "amsgrad"}
    )


def _step_of(program: Program, same_data: bool) -> Callable[[Step], None]:
    def step(operation: Step) -> None:
        import generate  # noqa: F401  # on a worker: the operations register themselves

        operation.run(program, _Alone(), 0, same_data)

    return step


def _weights(model: Any) -> Snapshot:
    return {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}


def run_on_servers(plan: Plan, cluster: LocalCluster) -> Snapshot:
    """Runs a program, its parameters cut into a shard for each server.

    Args:
        plan: of it.
        cluster: with one worker.

    Returns:
        The parameters and buffers of its model at the end.
    """
    servers = len(cluster.cluster_spec().job_tasks("ps"))
    partitioner = FixedShardsPartitioner(servers) if servers > 1 else None
    strategy = tfd.ParameterServerStrategy(cluster, variable_partitioner=partitioner, max_staleness=0)
    coordinator = tfd.coordinator.ClusterCoordinator(strategy)
    try:
        with strategy.scope():
            program = plan.build()
        for operation in plan.operations:
            if isinstance(operation, Step):
                coordinator.schedule(_step_of(program, plan.same_data), args=(operation,))
                coordinator.join(timeout=60)
            else:
                with strategy.scope():
                    operation.between(program)
        return _weights(program.model)
    finally:
        coordinator.close(end_workers=False)
        strategy.servers.close()
        strategy.context.close()


def outcome_on_servers(plan: Plan, cluster: LocalCluster) -> Outcome:
    """Runs a program on one device and on servers.

    Args:
        plan: of it.
        cluster: with one worker.
    """
    try:
        expected = run_by_hand(plan, replicas=1)[-1]
    except Exception as error:
        return raised(IMPOSSIBLE, error)
    try:
        found = run_on_servers(plan, cluster)
    except Exception as error:
        return raised(REFUSED, error)
    assert expected is not None
    difference = first_difference({name: expected[0][name] for name in found}, found)
    return Outcome(SAME) if difference is None else Outcome(DIFFERS, difference)
