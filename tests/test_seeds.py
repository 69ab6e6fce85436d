"""The snippets of articles about tf.distribute run as they stand; only the line of the import is another one.

The comparison of synchronous and asynchronous training, which needs servers, is in
``tests/integrations/test_keras_servers.py``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd

AGGREGATION_METHODS = {
    "ADD_N": """
import tensorflow as tf
optimizer = tf.compat.v1.train.GradientDescentOptimizer(learning_rate=0.01)
grads_and_vars = optimizer.compute_gradients(loss)
train_op = optimizer.apply_gradients(grads_and_vars, aggregation_method=tf.compat.v1.AggregationMethod.ADD_N)
""",
    "DEFAULT": """
import tensorflow as tf
optimizer = tf.compat.v1.train.AdamOptimizer(learning_rate=0.001)
grads_and_vars = optimizer.compute_gradients(loss)
train_op = optimizer.apply_gradients(grads_and_vars, aggregation_method=tf.compat.v1.AggregationMethod.DEFAULT)
""",
    "TREE": """
import tensorflow as tf
optimizer = tf.compat.v1.train.RMSPropOptimizer(learning_rate=0.01)
grads_and_vars = optimizer.compute_gradients(loss)
train_op = optimizer.apply_gradients(grads_and_vars, aggregation_method=tf.compat.v1.AggregationMethod.TREE)
""",
}

VARIABLE_AGGREGATION = """
import tensorflow as tf

# Initialize a strategy for distributed training
strategy = tf.distribute.MirroredStrategy()

# Define a distributed variable with the SUM aggregation method
with strategy.scope():
    variable = tf.Variable(initial_value=1.0, aggregation=tf.VariableAggregation.SUM)

@tf.function
def update_fn():
    tf.print("Value before update:", variable.value())
    variable.assign_add(1.0)
    tf.print("Value after update:", variable.value())

# Distributing the function across devices
strategy.run(update_fn)
"""

SYNCHRONOUS = """
import tensorflow as tf

# Define strategy for synchronous training
gpus = tf.config.experimental.list_physical_devices('GPU')
if gpus:
    strategy = tf.distribute.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
else:
    strategy = tf.distribute.MirroredStrategy()
"""


def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Runs a snippet with the other import; returns its names."""
    assert snippet.count("import tensorflow as tf") == 1
    exec(snippet.replace("import tensorflow as tf", "import tfstyle_dist as tf"), names)
    return names


@pytest.mark.parametrize("method", AGGREGATION_METHODS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_choosing_an_aggregation_method(method: str, replicas: int) -> None:
    with tfd.MirroredStrategy([f"cpu:{number}" for number in range(replicas)]) as strategy:
        with strategy.scope():
            weight = tfd.Variable(torch.ones(3))

        def step() -> None:
            run(AGGREGATION_METHODS[method], loss=(weight * weight).sum() / replicas)

        strategy.run(step)
        # Of the first step of each rule with a gradient of 2.
        moved = {"ADD_N": 0.01 * 2, "DEFAULT": 0.001, "TREE": 0.01 * 2 / (0.1 * 4 + 0.9) ** 0.5}[method]
        torch.testing.assert_close(weight.detach().clone(), torch.full((3,), 1 - moved), rtol=1e-5, atol=1e-6)


def test_aggregating_a_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = run(VARIABLE_AGGREGATION)
    assert capsys.readouterr().err == "Value before update: 1\nValue after update: 2\n"
    assert names["variable"].read_value().item() == 2.0
    names["strategy"].close()


def test_a_number_is_no_contribution_of_several_replicas() -> None:
    """What the same snippet says in TensorFlow on more than one device: each replica would add the same object."""
    snippet = VARIABLE_AGGREGATION.replace("MirroredStrategy()", "MirroredStrategy(['CPU:0', 'CPU:1'])")
    with pytest.raises(ValueError, match="cannot be reduced"):
        run(snippet)
    names = run(snippet.replace("assign_add(1.0)", "assign_add(tf.compat.v1.Variable(1.0).value())"))
    assert names["variable"].read_value().item() == 3.0
    names["strategy"].close()


def test_choosing_a_strategy_by_the_devices_there_are() -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("the snippet takes two GPUs or none")
    strategy = run(SYNCHRONOUS)["strategy"]
    assert re.fullmatch(r"<MirroredStrategy on \[(cpu:0|cuda:0, cuda:1)\]>", repr(strategy))
    strategy.close()
