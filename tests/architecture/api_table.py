"""What of TensorFlow's public surface this package has: one entry per symbol and public member.

The surface is ``tests/data/tf_api_surface.json`` (with ``tf.compat.v1.distribute``) and ``tf_v1_optimizers.json``.
What is left out is listed in docs/status.md, with its reason. An entry is one of

* ``IN``: the package has it, under ``port_path`` and with TensorFlow's parameter names;
* ``planned("area")``: the package does not have it yet, and says so in docs/status.md;
* ``not_applicable("reason")``: it has no meaning in PyTorch.

A class that is in the package has a table of its members; any other entry holds for all members of a symbol.
"""

from __future__ import annotations

from typing import Final

IN: Final = "in"


def planned(area: str) -> str:
    """An entry for something that comes with the work on ``area``."""
    return f"planned:{area}"


def not_applicable(reason: str) -> str:
    """An entry for something that is left out for good."""
    return f"n/a:{reason}"


GRAPH = not_applicable("PyTorch has no graph mode and no sessions")
ONE_HOOK = not_applicable("a subclass of CrossDeviceOps overrides sum_values, nothing else")
SUBCLASSING = not_applicable("one class per strategy; strategy.extended is a view of it")
WRAPS_TORCH = not_applicable("the base class wraps a torch.optim.Optimizer")

REMOTE_TPU = not_applicable("programs run on the TPU hosts themselves; there is no remote TPU runtime to ask")
V1_ONLY = not_applicable(
    "TensorFlow 1 only: strategy.run calls a function on each replica, a variable is read as it is"
)
ONE_PLACE = not_applicable("a checkpoint is written as a whole, by torch.distributed.checkpoint")
V2_ONLY = ("all_gather", "gather", "experimental_distribute_values_from_function")
PROTO = not_applicable("PyTorch has no protocol buffers")

RESOLVER: Final = {
    "cluster_spec": IN,
    "environment": IN,
    "master": IN,
    "num_accelerators": IN,
    "task_id": IN,
    "task_type": IN,
}

STRATEGY: Final = {
    "__init__": IN,
    "cluster_resolver": IN,
    "colocate_vars_with": IN,
    "configure": GRAPH,
    "distribute_datasets_from_function": IN,
    "experimental_distribute_dataset": IN,
    "experimental_distribute_datasets_from_function": IN,
    "experimental_distribute_values_from_function": IN,
    "experimental_local_results": IN,
    "experimental_run": IN,
    "extended": IN,
    "gather": IN,
    "group": GRAPH,
    "make_dataset_iterator": IN,
    "make_input_fn_iterator": IN,
    "num_replicas_in_sync": IN,
    "reduce": IN,
    "run": IN,
    "scope": IN,
    "unwrap": IN,
    "update_config_proto": GRAPH,
}

CROSS_DEVICE_OPS: Final = {
    "__init__": IN,
    "batch_reduce": IN,
    "batch_reduce_implementation": ONE_HOOK,
    "broadcast": IN,
    "broadcast_implementation": ONE_HOOK,
    "reduce": IN,
    "reduce_implementation": ONE_HOOK,
}

OPTIMIZER: Final = {
    "GATE_GRAPH": IN,
    "GATE_NONE": IN,
    "GATE_OP": IN,
    "__init__": IN,
    "apply_gradients": IN,
    "compute_gradients": IN,
    "get_name": IN,
    "get_slot": IN,
    "get_slot_names": IN,
    "minimize": IN,
    "variables": IN,
}

CLUSTER_COORDINATOR: Final = {
    "__init__": IN,
    "create_per_worker_dataset": IN,
    "done": IN,
    "fetch": IN,
    "join": IN,
    "schedule": IN,
    "strategy": IN,
}

PARTITIONER: Final = {"__call__": IN, "__init__": IN}

VARIABLE: Final = {
    "__init__": IN,
    "aggregation": IN,
    "assign": IN,
    "assign_add": IN,
    "assign_sub": IN,
    "batch_scatter_update": IN,
    "constraint": IN,
    "device": IN,
    "dtype": IN,
    "gather_nd": IN,
    "graph": GRAPH,
    "initial_value": GRAPH,
    "initializer": GRAPH,
    "name": IN,
    "op": GRAPH,
    "read_value": IN,
    "ref": not_applicable("PyTorch tensors are hashable"),
    "scatter_add": IN,
    "scatter_div": IN,
    "scatter_max": IN,
    "scatter_min": IN,
    "scatter_mul": IN,
    "scatter_sub": IN,
    "scatter_update": IN,
    "set_shape": GRAPH,
    "shape": IN,
    "sparse_read": IN,
    "synchronization": IN,
    "trainable": IN,
    "value": IN,
}

REPLICA_CONTEXT: Final = {
    "__enter__": not_applicable("strategy.run enters it"),
    "__exit__": not_applicable("strategy.run leaves it"),
    "__init__": IN,
    "all_gather": IN,
    "all_reduce": IN,
    "devices": IN,
    "merge_call": IN,
    "num_replicas_in_sync": IN,
    "replica_id_in_sync_group": IN,
    "strategy": IN,
}

EXTENDED: Final = {
    "__init__": SUBCLASSING,
    "batch_reduce_to": IN,
    "colocate_vars_with": IN,
    "experimental_require_static_shapes": IN,
    "parameter_devices": IN,
    "reduce_to": IN,
    "update": IN,
    "value_container": IN,
    "variable_created_in_scope": IN,
    "worker_devices": IN,
}

SYMBOLS: Final[dict[str, str | dict[str, str]]] = {
    "tf.AggregationMethod": IN,
    "tf.Variable": VARIABLE,
    "tf.VariableAggregation": IN,
    "tf.VariableSynchronization": IN,
    "tf.compat.v1.train.AdadeltaOptimizer": OPTIMIZER,
    "tf.compat.v1.train.AdagradOptimizer": OPTIMIZER,
    "tf.compat.v1.train.AdamOptimizer": OPTIMIZER,
    "tf.compat.v1.train.FtrlOptimizer": OPTIMIZER,
    "tf.compat.v1.train.GradientDescentOptimizer": OPTIMIZER,
    "tf.compat.v1.train.MomentumOptimizer": OPTIMIZER,
    "tf.compat.v1.train.Optimizer": {**OPTIMIZER, "__init__": WRAPS_TORCH},
    "tf.compat.v1.train.RMSPropOptimizer": OPTIMIZER,
    "tf.data.experimental.AutoShardPolicy": IN,
    "tf.distribute.CrossDeviceOps": CROSS_DEVICE_OPS,
    "tf.distribute.DistributedDataset": {"__iter__": IN, "element_spec": IN, "reduce": IN},
    "tf.distribute.DistributedIterator": {
        "__iter__": IN,
        "__next__": IN,
        "element_spec": IN,
        "get_next": IN,
        "get_next_as_optional": IN,
    },
    "tf.distribute.DistributedValues": IN,
    "tf.distribute.HierarchicalCopyAllReduce": CROSS_DEVICE_OPS,
    "tf.distribute.InputContext": {
        "__init__": IN,
        "get_per_replica_batch_size": IN,
        "input_pipeline_id": IN,
        "num_input_pipelines": IN,
        "num_replicas_in_sync": IN,
    },
    "tf.distribute.InputOptions": {
        "__init__": IN,
        "experimental_fetch_to_device": IN,
        "experimental_per_replica_buffer_size": IN,
        "experimental_place_dataset_on_device": IN,
        "experimental_replication_mode": IN,
    },
    "tf.distribute.InputReplicationMode": IN,
    "tf.distribute.MirroredStrategy": STRATEGY,
    "tf.distribute.MultiWorkerMirroredStrategy": STRATEGY,
    "tf.distribute.NcclAllReduce": CROSS_DEVICE_OPS,
    "tf.distribute.OneDeviceStrategy": STRATEGY,
    "tf.distribute.ParameterServerStrategy": STRATEGY,
    "tf.distribute.ReduceOp": IN,
    "tf.distribute.ReductionToOneDevice": CROSS_DEVICE_OPS,
    "tf.distribute.ReplicaContext": REPLICA_CONTEXT,
    "tf.distribute.RunOptions": {
        "__init__": IN,
        "experimental_bucketizing_dynamic_shape": IN,
        "experimental_enable_dynamic_batch_size": IN,
        "experimental_xla_options": IN,
    },
    "tf.distribute.Server": {
        "__init__": IN,
        "create_local_server": IN,
        "join": IN,
        "server_def": IN,
        "start": IN,
        "target": IN,
    },
    "tf.distribute.Strategy": {**STRATEGY, "__init__": SUBCLASSING},
    "tf.distribute.StrategyExtended": EXTENDED,
    "tf.distribute.TPUStrategy": {
        **STRATEGY,
        "experimental_assign_to_logical_device": IN,
        "experimental_replicate_to_logical_devices": IN,
        "experimental_split_to_logical_devices": IN,
    },
    "tf.distribute.cluster_resolver.ClusterResolver": RESOLVER,
    "tf.distribute.cluster_resolver.GCEClusterResolver": {**RESOLVER, "__init__": IN, "rpc_layer": IN},
    "tf.distribute.cluster_resolver.KubernetesClusterResolver": {**RESOLVER, "__init__": IN},
    "tf.distribute.cluster_resolver.KubernetesExecutableLocation": IN,
    "tf.distribute.cluster_resolver.SimpleClusterResolver": {**RESOLVER, "__init__": IN, "rpc_layer": IN},
    "tf.distribute.cluster_resolver.SlurmClusterResolver": {**RESOLVER, "__init__": IN, "get_task_info": IN},
    "tf.distribute.cluster_resolver.TFConfigClusterResolver": {**RESOLVER, "__init__": IN, "rpc_layer": IN},
    "tf.distribute.cluster_resolver.TPUClusterResolver": {
        **RESOLVER,
        "__enter__": IN,
        "__exit__": IN,
        "__init__": IN,
        "connect": IN,
        "get_coordination_service_leader": REMOTE_TPU,
        "get_job_name": IN,
        "get_master": IN,
        "get_tpu_system_metadata": REMOTE_TPU,
        "set_tpu_topology": REMOTE_TPU,
        "tpu_hardware_feature": REMOTE_TPU,
    },
    "tf.distribute.cluster_resolver.UnionResolver": {**RESOLVER, "__init__": IN, "rpc_layer": IN},
    "tf.distribute.coordinator.ClusterCoordinator": CLUSTER_COORDINATOR,
    "tf.distribute.coordinator.PerWorkerValue": {"__init__": IN},
    "tf.distribute.coordinator.RemoteValue": {"fetch": IN, "get": IN},
    "tf.distribute.coordinator.experimental_get_current_worker_index": IN,
    "tf.distribute.experimental.CentralStorageStrategy": STRATEGY,
    "tf.distribute.experimental.CollectiveCommunication": IN,
    "tf.distribute.experimental.CollectiveHints": {"__init__": IN},
    "tf.distribute.experimental.CommunicationImplementation": IN,
    "tf.distribute.experimental.CommunicationOptions": {"__init__": IN},
    "tf.distribute.experimental.MultiWorkerMirroredStrategy": STRATEGY,
    "tf.distribute.experimental.ParameterServerStrategy": STRATEGY,
    "tf.distribute.experimental.PreemptionCheckpointHandler": {
        "__init__": IN,
        "run": IN,
        "save_checkpoint_if_preempted": IN,
        "total_run_calls": IN,
        "watch_preemption_scope": IN,
    },
    "tf.distribute.experimental.PreemptionWatcher": {
        "__init__": IN,
        "block_until_worker_exit": IN,
        "preemption_message": IN,
    },
    "tf.distribute.experimental.TPUStrategy": STRATEGY,
    "tf.distribute.experimental.TerminationConfig": {"__init__": IN},
    "tf.distribute.experimental.ValueContext": {
        "__init__": IN,
        "num_replicas_in_sync": IN,
        "replica_id_in_sync_group": IN,
    },
    "tf.distribute.experimental.coordinator.ClusterCoordinator": CLUSTER_COORDINATOR,
    "tf.distribute.experimental.coordinator.PerWorkerValues": {"__init__": IN},
    "tf.distribute.experimental.coordinator.RemoteValue": {"fetch": IN, "get": IN},
    "tf.distribute.experimental.partitioners.FixedShardsPartitioner": PARTITIONER,
    "tf.distribute.experimental.partitioners.MaxSizePartitioner": PARTITIONER,
    "tf.distribute.experimental.partitioners.MinSizePartitioner": PARTITIONER,
    "tf.distribute.experimental.partitioners.Partitioner": {"__call__": IN},
    "tf.distribute.experimental.rpc.Client": {"call": IN, "create": IN},
    "tf.distribute.experimental.rpc.Server": {"create": IN, "register": IN, "start": IN},
    "tf.distribute.experimental_set_strategy": IN,
    "tf.distribute.get_replica_context": IN,
    "tf.distribute.get_strategy": IN,
    "tf.distribute.has_strategy": IN,
    "tf.distribute.in_cross_replica_context": IN,
    "tf.gradients": IN,
    "tf.nn.compute_average_loss": IN,
    "tf.nn.scale_regularization_loss": IN,
    "tf.train.Checkpoint": dict.fromkeys(("read", "restore", "save", "save_counter", "sync", "write"), IN),
    "tf.train.CheckpointManager": {
        "checkpoint": IN,
        "checkpoint_interval": IN,
        "checkpoints": IN,
        "directory": IN,
        "latest_checkpoint": IN,
        "restore_or_initialize": IN,
        "save": IN,
        "sync": IN,
    },
    "tf.train.ClusterSpec": {
        "__bool__": IN,
        "__eq__": IN,
        "__init__": IN,
        "__ne__": IN,
        "as_cluster_def": PROTO,
        "as_dict": IN,
        "job_tasks": IN,
        "jobs": IN,
        "num_tasks": IN,
        "task_address": IN,
        "task_indices": IN,
    },
}

_SAME_IN_V1: Final = (
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "RunOptions",
    "Server",
    "cluster_resolver.ClusterResolver",
    "cluster_resolver.GCEClusterResolver",
    "cluster_resolver.KubernetesClusterResolver",
    "cluster_resolver.KubernetesExecutableLocation",
    "cluster_resolver.SimpleClusterResolver",
    "cluster_resolver.SlurmClusterResolver",
    "cluster_resolver.TFConfigClusterResolver",
    "cluster_resolver.TPUClusterResolver",
    "cluster_resolver.UnionResolver",
    "experimental.CollectiveCommunication",
    "experimental.CollectiveHints",
    "experimental.CommunicationImplementation",
    "experimental.CommunicationOptions",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
)
_V1_STRATEGY: Final = {
    **{name: entry for name, entry in STRATEGY.items() if name not in V2_ONLY},
    "experimental_make_numpy_dataset": IN,
}

SYMBOLS |= {
    "tf.compat.v1.AggregationMethod": IN,
    "tf.compat.v1.VariableAggregation": IN,
    "tf.compat.v1.VariableSynchronization": IN,
    "tf.compat.v1.fixed_size_partitioner": IN,
    "tf.compat.v1.gradients": IN,
    "tf.compat.v1.min_max_variable_partitioner": IN,
    "tf.compat.v1.variable_axis_size_partitioner": IN,
    "tf.config.LogicalDeviceConfiguration": {
        "__init__": IN,
        "experimental_device_ordinal": IN,
        "experimental_priority": IN,
        "memory_limit": IN,
    },
    "tf.config.experimental_connect_to_cluster": IN,
    "tf.config.list_logical_devices": IN,
    "tf.config.set_logical_device_configuration": IN,
    "tf.data.experimental.DistributeOptions": {
        "__eq__": IN,
        "__init__": IN,
        "__ne__": IN,
        "auto_shard_policy": IN,
        "num_devices": IN,
    },
    "tf.train.CheckpointOptions": {
        "enable_async": IN,
        "experimental_enable_async_checkpoint": IN,
        "experimental_io_device": ONE_PLACE,
        "experimental_sharding_callback": ONE_PLACE,
        "experimental_skip_slot_variables": ONE_PLACE,
        "experimental_write_callbacks": ONE_PLACE,
    },
    "tf.compat.v1.distribute.MirroredStrategy": _V1_STRATEGY,
    "tf.compat.v1.distribute.OneDeviceStrategy": _V1_STRATEGY,
    "tf.compat.v1.distribute.Strategy": {**_V1_STRATEGY, "__init__": SUBCLASSING},
    "tf.compat.v1.distribute.ReplicaContext": {
        name: entry for name, entry in REPLICA_CONTEXT.items() if name not in V2_ONLY
    },
    "tf.compat.v1.distribute.StrategyExtended": {
        **EXTENDED,
        **dict.fromkeys(("broadcast_to", "non_slot_devices", "update_non_slot"), IN),
        "call_for_each_replica": V1_ONLY,
        "experimental_between_graph": GRAPH,
        "experimental_make_numpy_dataset": V1_ONLY,
        "experimental_run_steps_on_iterator": V1_ONLY,
        "experimental_should_init": GRAPH,
        "read_var": V1_ONLY,
        "should_checkpoint": GRAPH,
        "should_save_summary": GRAPH,
    },
    "tf.compat.v1.distribute.get_loss_reduction": IN,
    "tf.compat.v1.distribute.experimental.CentralStorageStrategy": _V1_STRATEGY,
    "tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy": _V1_STRATEGY,
    "tf.compat.v1.distribute.experimental.ParameterServerStrategy": _V1_STRATEGY,
    "tf.compat.v1.distribute.experimental.TPUStrategy": {**_V1_STRATEGY, "steps_per_run": GRAPH},
}
SYMBOLS |= {f"tf.compat.v1.distribute.{name}": SYMBOLS[f"tf.distribute.{name}"] for name in _SAME_IN_V1}

# Parameters that TensorFlow 1 lets one leave out, and TensorFlow 2 does not.
REQUIRED: Final[dict[str, set[str]]] = {
    f"tf.compat.v1.distribute.{name}.reduce": {"axis"}
    for name in (
        "MirroredStrategy",
        "OneDeviceStrategy",
        "Strategy",
        "experimental.CentralStorageStrategy",
        "experimental.MultiWorkerMirroredStrategy",
        "experimental.ParameterServerStrategy",
        "experimental.TPUStrategy",
    )
}

# Parameters that are left out of what the package has. A * in a key stands for any text.
LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "tf.Variable.__init__": {
        "validate_shape": GRAPH,
        "caching_device": GRAPH,
        "variable_def": GRAPH,
        "import_scope": GRAPH,
        "shape": GRAPH,
        "experimental_enable_variable_lifting": GRAPH,
    },
    "tf.gradients": {"gate_gradients": GRAPH},
    "tf.compat.v1.distribute.experimental.TPUStrategy.__init__": {"steps_per_run": GRAPH},
    "tf.compat.v1.gradients": {"colocate_gradients_with_ops": GRAPH, "gate_gradients": GRAPH},
}

NO_DEFAULT = not_applicable("TensorFlow 2 has no default for it")
FOLDER = not_applicable("a folder of the package has this name: use train.gradients or compat.v1.gradients")

# Where the package has what TensorFlow has; the first prefix that fits counts.
PREFIXES: Final = {"tf.gradients": "tfstyle_dist.train.gradients", "tf.": "tfstyle_dist."}


def port_path(symbol: str) -> str:
    """The dotted path under which the package has, or will have, a TensorFlow symbol."""
    prefix = next(prefix for prefix in PREFIXES if symbol.startswith(prefix))
    return PREFIXES[prefix] + symbol.removeprefix(prefix)
