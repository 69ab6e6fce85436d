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


def has(members: str) -> dict[str, str]:
    """Entries for members that the package has; their names stand in one text."""
    return dict.fromkeys(members.split(), IN)


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

RESOLVER: Final = has("cluster_spec environment master num_accelerators task_id task_type")

STRATEGY: Final = {
    **has("""
    __init__ cluster_resolver colocate_vars_with distribute_datasets_from_function
    experimental_distribute_dataset experimental_distribute_datasets_from_function
    experimental_distribute_values_from_function experimental_local_results experimental_run extended gather
    make_dataset_iterator make_input_fn_iterator num_replicas_in_sync reduce run scope unwrap
"""),
    "configure": GRAPH,
    "group": GRAPH,
    "update_config_proto": GRAPH,
}

CROSS_DEVICE_OPS: Final = {
    **has("__init__ batch_reduce broadcast reduce"),
    "batch_reduce_implementation": ONE_HOOK,
    "broadcast_implementation": ONE_HOOK,
    "reduce_implementation": ONE_HOOK,
}

OPTIMIZER: Final = has("""
    GATE_GRAPH GATE_NONE GATE_OP __init__ apply_gradients compute_gradients get_name get_slot get_slot_names
    minimize variables
""")

CLUSTER_COORDINATOR: Final = has("__init__ create_per_worker_dataset done fetch join schedule strategy")

PARTITIONER: Final = {"__call__": IN, "__init__": IN}

VARIABLE: Final = {
    **has("""
    __init__ aggregation assign assign_add assign_sub batch_scatter_update constraint device dtype gather_nd
    name read_value scatter_add scatter_div scatter_max scatter_min scatter_mul scatter_sub scatter_update shape
    sparse_read synchronization trainable value
"""),
    "graph": GRAPH,
    "initial_value": GRAPH,
    "initializer": GRAPH,
    "op": GRAPH,
    "ref": not_applicable("PyTorch tensors are hashable"),
    "set_shape": GRAPH,
}

REPLICA_CONTEXT: Final = {
    **has("""
    __init__ all_gather all_reduce devices merge_call num_replicas_in_sync replica_id_in_sync_group strategy
"""),
    "__enter__": not_applicable("strategy.run enters it"),
    "__exit__": not_applicable("strategy.run leaves it"),
}

EXTENDED: Final = {
    **has("""
    batch_reduce_to colocate_vars_with experimental_require_static_shapes parameter_devices reduce_to update
    value_container variable_created_in_scope worker_devices
"""),
    "__init__": SUBCLASSING,
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
    "tf.distribute.DistributedIterator": has("__iter__ __next__ element_spec get_next get_next_as_optional"),
    "tf.distribute.DistributedValues": IN,
    "tf.distribute.HierarchicalCopyAllReduce": CROSS_DEVICE_OPS,
    "tf.distribute.InputContext": has("""
        __init__ get_per_replica_batch_size input_pipeline_id num_input_pipelines num_replicas_in_sync
    """),
    "tf.distribute.InputOptions": has("""
        __init__ experimental_fetch_to_device experimental_per_replica_buffer_size
        experimental_place_dataset_on_device experimental_replication_mode
    """),
    "tf.distribute.InputReplicationMode": IN,
    "tf.distribute.MirroredStrategy": STRATEGY,
    "tf.distribute.MultiWorkerMirroredStrategy": STRATEGY,
    "tf.distribute.NcclAllReduce": CROSS_DEVICE_OPS,
    "tf.distribute.OneDeviceStrategy": STRATEGY,
    "tf.distribute.ParameterServerStrategy": STRATEGY,
    "tf.distribute.ReduceOp": IN,
    "tf.distribute.ReductionToOneDevice": CROSS_DEVICE_OPS,
    "tf.distribute.ReplicaContext": REPLICA_CONTEXT,
    "tf.distribute.RunOptions": has("""
        __init__ experimental_bucketizing_dynamic_shape experimental_enable_dynamic_batch_size
        experimental_xla_options
    """),
    "tf.distribute.Server": has("__init__ create_local_server join server_def start target"),
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
        **has("__enter__ __exit__ __init__ connect get_job_name get_master"),
        **RESOLVER,
        "get_coordination_service_leader": REMOTE_TPU,
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
    "tf.distribute.experimental.PreemptionCheckpointHandler": has("""
        __init__ run save_checkpoint_if_preempted total_run_calls watch_preemption_scope
    """),
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
    "tf.train.CheckpointManager": has("""
        checkpoint checkpoint_interval checkpoints directory latest_checkpoint restore_or_initialize save sync
    """),
    "tf.train.ClusterSpec": {
        **has("""
        __bool__ __eq__ __init__ __ne__ as_dict job_tasks jobs num_tasks task_address task_indices
    """),
        "as_cluster_def": PROTO,
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
    "tf.config.LogicalDeviceConfiguration": has("""
        __init__ experimental_device_ordinal experimental_priority memory_limit
    """),
    "tf.config.experimental_connect_to_cluster": IN,
    "tf.config.list_logical_devices": IN,
    "tf.config.set_logical_device_configuration": IN,
    "tf.data.experimental.DistributeOptions": has("__eq__ __init__ __ne__ auto_shard_policy num_devices"),
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
