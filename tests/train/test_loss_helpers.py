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


@pytest.mark.parametrize(
    ("loss", "weight", "shapes"),
    [
        (torch.ones(3), [0.2, 0.8], r"\(2,\) does not fit per_example_loss of shape \(3,\)"),
        (torch.ones(4, 2), torch.ones(3), r"\(3, 1\) does not fit per_example_loss of shape \(4, 2\)"),
        (torch.ones(1), torch.ones(3), r"\(3,\) does not fit per_example_loss of shape \(1,\)"),
    ],
)
def test_weights_of_other_sizes_are_refused(loss: torch.Tensor, weight: Any, shapes: str) -> None:
    with pytest.raises(ValueError, match=f"sample_weight of shape {shapes}.* Give one weight for all"):
        td.nn.compute_average_loss(loss, sample_weight=weight, global_batch_size=10)


@pytest.mark.parametrize("value", [None, "text", [torch.ones(2), torch.ones(3)]])
def test_what_is_no_loss_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`per_example_loss` must be a tensor, numbers, or a list of such.*got"):
        td.nn.compute_average_loss(value)
    if value is not None:
        with pytest.raises(TypeError, match=r"`sample_weight` must be a tensor, numbers, or a list of such.*got"):
            td.nn.compute_average_loss(torch.ones(2), sample_weight=value)
    with pytest.raises(TypeError, match=r"`regularization_loss` must be a tensor, numbers, or a list of such.*got"):
        td.nn.scale_regularization_loss([value])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0])
def test_an_average_over_no_examples_is_zero_and_so_is_its_gradient(value: float) -> None:
    loss = torch.tensor([value, 1.0], requires_grad=True)
    average = td.nn.compute_average_loss(loss, global_batch_size=0)
    average.backward()
    assert (average.item(), loss.grad.tolist()) == (0.0, [0.0, 0.0])  # type: ignore[union-attr]
    assert td.nn.compute_average_loss(torch.tensor([1, 2]), global_batch_size=0).dtype is torch.float32


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
