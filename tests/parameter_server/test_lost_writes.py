"""What would be lost between the coordinator's program and the workers is said in the log."""

from __future__ import annotations

import re
import sys
from typing import Any

import cloudpickle
import pytest
import torch

from tfstyle_dist.core.logging import _said, get_logger

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_what_a_function_writes_to_its_own_copies_is_said(cluster: Any) -> None:
    """Each worker has a copy of the tensors that come with a function, and of modules of no scope."""
    c = cluster(workers=1, ps=1)
    total, teacher, batch_norm = torch.zeros(2), torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(2)
    with c.strategy.scope():
        norm = torch.nn.BatchNorm1d(2)

    def innocent(x: torch.Tensor) -> torch.Tensor:
        x += total + teacher.weight.detach().sum()
        return norm(x).sum()

    def adds() -> None:
        total.add_(1)

    def averages() -> None:
        with torch.no_grad():
            teacher.weight.mul_(0.5)

    def normalizes() -> None:
        batch_norm(torch.randn(4, 2))

    c.coordinator.schedule(innocent, args=(torch.randn(4, 2),))
    c.coordinator.join(timeout=30)
    assert "that came with it" not in c.output()
    for function, shape in ((adds, r"\(2,\)"), (averages, r"\(1, 2\)"), (normalizes, r"\(\)")):
        c.coordinator.schedule(function)
        c.coordinator.join(timeout=30)
        name = function.__qualname__.replace("<", "[<]")
        assert re.search(rf"The scheduled function {name} wrote to a tensor of shape {shape} that came", c.output())


def test_a_step_without_gradients_is_said(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The backward pass was a worker's, the step is the coordinator's."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    def backward() -> None:
        net(torch.ones(1, 2)).sum().backward()

    c.coordinator.schedule(backward)
    c.coordinator.join(timeout=30)
    _said.discard("a step without gradients")
    get_logger().propagate, before = True, get_logger().propagate
    try:
        optimizer.step()
    finally:
        get_logger().propagate = before
    assert "SGD.step() in the coordinator's program found no gradients" in caplog.text


def test_another_parameter_in_the_place_of_one_is_refused(cluster: Any) -> None:
    """What ``load_state_dict(assign=True)`` does in a function; the module has its own parameter again after that."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        net = torch.nn.Linear(2, 1)
    before = net.weight.detach().clone()

    def assigns() -> None:
        net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()}, assign=True)

    def reads() -> torch.Tensor:
        return net.weight.detach().clone()

    c.coordinator.schedule(assigns)
    with pytest.raises(RuntimeError, match="put another tensor in the place of the parameter 'weight' of Linear"):
        c.coordinator.join(timeout=30)
    assert torch.equal(torch.as_tensor(c.coordinator.schedule(reads).fetch()), before)
