"""Values of variables as numpy arrays and Python numbers, as in TensorFlow, where a variable is not part of a graph."""

from __future__ import annotations

import warnings

import numpy as np
import torch

import tfstyle_dist as tfd


def test_numpy_of_a_trainable_variable_is_its_value() -> None:
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = tfd.Variable([1.0, 2.0], aggregation=tfd.VariableAggregation.SUM)
    array = v.numpy()
    array += 1.0  # memory of its own
    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])

    def step() -> np.ndarray:
        v.assign_add(torch.tensor([1.0, 1.0]))
        return v.numpy()

    for array in strategy.experimental_local_results(strategy.run(step)):
        np.testing.assert_array_equal(array, [3.0, 4.0])
    strategy.close()


def test_a_trainable_variable_is_a_number_without_a_warning() -> None:
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = tfd.Variable(2.0, aggregation=tfd.VariableAggregation.SUM)

    def step() -> torch.Tensor:
        return torch.tensor([float(v), int(v), complex(v).real])

    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (float(v), int(v), complex(v)) == (2.0, 2, 2 + 0j)
            for found in strategy.experimental_local_results(strategy.run(step)):
                assert found.tolist() == [2.0, 2.0, 2.0]
    finally:
        torch.set_warn_always(before)
    strategy.close()
