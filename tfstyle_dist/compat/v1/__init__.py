"""``tf.compat.v1``: TensorFlow 1's paths to what there is once."""

from tfstyle_dist import (
    AggregationMethod,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    config,
    data,
    nn,
    train,
)
from tfstyle_dist.compat.v1 import distribute
from tfstyle_dist.core.lazy import loader
from tfstyle_dist.functions import print
from tfstyle_dist.parameter_server.client.partitioning import (
    fixed_size_partitioner,
    min_max_variable_partitioner,
    variable_axis_size_partitioner,
)
from tfstyle_dist.train import gradients

__all__ = [
    "AggregationMethod",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "config",
    "data",
    "distribute",
    "fixed_size_partitioner",
    "gradients",
    "min_max_variable_partitioner",
    "nn",
    "print",
    "train",
    "variable_axis_size_partitioner",
]

__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's
