"""``nn.compute_average_loss`` and ``scale_regularization_loss`` with lists and weights, as TensorFlow takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.train import GradientDescentOptimizer

ONES = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("loss", "weight", "expected"),
    [
        (ONES, [[1.0], [0.5], [1.0], [0.5]], 7.0 / 4),
        (ONES.reshape(4, 1), [1.0, 0.5, 1.0, 0.5], 7.0 / 4),
        (torch.ones(2, 2), [1.0, 0.5], 3.0 / 2),
        (torch.arange(6.0).reshape(3, 2), [1.0, 2.0, 3.0], 38.0 / 3),
        (torch.tensor([1, 2]), [0.5, 0.5], 0.5),
        (ONES, 0.5, 5.0 / 4),
        (ONES, [torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0), 0.0], 4.0 / 4),
    ],
)
def test_weights_fit_the_losses_as_in_tensorflow(loss: torch.Tensor, weight: Any, expected: float) -> None:
    with td.OneDeviceStrategy("cpu:0") as strategy:
        found = strategy.run(lambda: td.nn.compute_average_loss(loss, sample_weight=weight))
    assert float(found) == pytest.approx(expected)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \(1, 4\) does not fit per_example_loss of shape \(4,\)"):
        td.nn.compute_average_loss(ONES, sample_weight=torch.ones(1, 4), global_batch_size=4)


def test_losses_and_weights_in_a_list_keep_their_gradients() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    td.nn.compute_average_loss([w * 1, w * 3], global_batch_size=2).backward()
    assert float(w.grad) == 2.0  # type: ignore[arg-type]
    w.grad = None
    td.nn.compute_average_loss(torch.ones(2), sample_weight=[w * 1, w * 3], global_batch_size=2).backward()
    assert float(w.grad) == 2.0  # type: ignore[arg-type]


def test_penalties_of_layers_in_a_list_train() -> None:
    """As the tutorials pass ``model.losses``, of whatever shapes."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            a, b = td.Variable(1.0), td.Variable([2.0, 2.0])
            optimizer = GradientDescentOptimizer(0.1)

        def step() -> None:
            optimizer.minimize(lambda: td.nn.scale_regularization_loss([a * a, b * b]), var_list=[a, b])

        strategy.run(step)
        assert float(a) == pytest.approx(0.8)
        assert b.tolist() == pytest.approx([1.6, 1.6])


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], ["cpu:0"]])
def test_gradients_of_rows_are_applied(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            table = td.Variable([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
            optimizer = GradientDescentOptimizer(0.1)

        def step() -> None:
            context = td.get_replica_context()
            assert context is not None
            rows = [0, 2] if context.replica_id_in_sync_group else [0, 0]
            values = torch.tensor([[1.0, 2.0], [1.0, 1.0]])
            optimizer.apply_gradients([(td.IndexedSlices(values, torch.tensor(rows)), table)])

        strategy.run(step)
        expected = [[0.7, 0.5], [2.0, 2.0], [2.9, 2.9]] if len(devices) == 2 else [[0.8, 0.7], [2.0, 2.0], [3.0, 3.0]]
        torch.testing.assert_close(table.value().cpu(), torch.tensor(expected))
