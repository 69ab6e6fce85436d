"""What people do in their first hour: each mistake is refused where it is made, with what to write instead."""

from __future__ import annotations

import json
import logging
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as td
from tfstyle_dist.coordinator.remote_value import RemoteValue
from tfstyle_dist.core.logging import _said
from tfstyle_dist.values import PerReplica

DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4)


@pytest.mark.parametrize(
    "function", [torch.mean, lambda v: torch.stack([v]), torch.nn.Linear(2, 1), lambda v: torch.nn.functional.relu(v)]
)
def test_a_value_of_each_replica_is_no_tensor_for_torch(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"was given a PerReplica, which is no tensor.*strategy\.run\(fn, args=\(value"):
        function(PerReplica((torch.ones(2), torch.ones(2))))


def test_a_value_of_each_replica_that_is_not_given_as_an_argument(two: Any) -> None:
    batch = next(iter(two.experimental_distribute_dataset(loader())))
    with pytest.raises(AttributeError, match=r"no attribute 'sum'.*strategy\.run\(fn, args=\(value,\)\)"):
        two.run(lambda: batch[0].sum())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((1, 2), r"was called with the 2 entries"),
        (([1, 2, 3],), r"args=tuple\(batch\) gives the parts"),
    ],
)
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_arguments_that_do_not_fit_the_step(devices: list[str], args: Any, said: str) -> None:
    def step(x: Any, y: Any, z: Any) -> None: ...

    with td.MirroredStrategy(devices) as strategy, pytest.raises(TypeError, match="missing") as caught:
        strategy.run(step, args=args)
    notes = "\n".join(caught.value.__notes__)
    assert re.search(said, notes)


def test_a_type_error_inside_of_the_step_gets_no_such_note(two: Any) -> None:
    with pytest.raises(TypeError) as caught:
        two.run(lambda x: len(x), args=(1,))
    assert "entries of args" not in "".join(caught.value.__notes__)


def test_a_loss_that_was_reduced_has_no_graph(two: Any) -> None:
    with two.scope():
        model = torch.nn.Linear(2, 1)
    losses = two.run(lambda x: model(x).mean(), args=(torch.ones(2, 2),))
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        two.reduce("MEAN", losses, axis=None).backward()
    assert "in the function that strategy.run gets" in caught.value.__notes__[-1]


@pytest.mark.parametrize("compiled_model", [False, True])
def test_a_compiled_function_may_call_run(two: Any, compiled_model: bool) -> None:
    """As ``tf.function`` around ``strategy.run``, which TensorFlow's tutorials write."""
    with two.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.nn.Linear(2, 1)
    alone.load_state_dict(model.state_dict())
    forward = torch.compile(model, backend="eager") if compiled_model else model

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((forward(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.compile(backend="eager")
    def train(x: Any, y: Any) -> Any:
        return two.run(step, args=(x, y))

    for batch in two.experimental_distribute_dataset(loader()):
        train(*batch)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in loader():
        plain.zero_grad()
        ((alone(x) - y) ** 2).mean().backward()
        plain.step()
    torch.testing.assert_close(model.weight.detach(), alone.weight.detach())


def test_a_strategy_is_not_pickled(two: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled.*Make a strategy in each process"):
        pickle.dumps(two)


def test_a_distributed_dataset_is_not_divided_again(two: Any) -> None:
    with pytest.raises(TypeError, match="is divided among the replicas already"):
        two.experimental_distribute_dataset(two.experimental_distribute_dataset(loader()))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda s: s.prepare, "write with strategy.scope"),
        (lambda s: s.rank, "write strategy.is_chief"),
        (lambda s: s.experimental_distribute_dataset(loader()).shuffle, r"shuffle=True\)"),
        (lambda s: s.experimental_distribute_dataset(loader()).prefetch, "Leave the line out"),
        (lambda s: td.train.AdamOptimizer(0.1).zero_grad, "optimizer.minimize"),
        (lambda s: s.extended.call_for_each_replica, "write strategy.run"),
        (lambda s: s.extended.should_checkpoint, "on every worker"),
        (lambda s: td.GradientTape, "are those of PyTorch"),  # type: ignore[attr-defined]
        (lambda s: td.train.AdamOptimizer(0.1).other, "no attribute 'other'$"),  # type: ignore[attr-defined]
        (lambda s: s.other, "no attribute 'other'$"),
    ],
)
def test_names_of_other_packages(two: Any, ask: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute.*{said}|{said}"):
        ask(two)


@pytest.mark.parametrize(("task", "warned"), [("worker", 1), ("evaluator", 0)])
def test_mirrored_strategy_says_that_it_does_not_use_a_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, task: str, warned: int
) -> None:
    _said.discard("a cluster that is not used")
    cluster = {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": task, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with caplog.at_level(logging.WARNING), td.MirroredStrategy(["cpu:0"]):
        assert len([m for m in caplog.messages if "Write MultiWorkerMirroredStrategy()" in m]) == warned


def test_a_number_of_devices_is_not_their_names() -> None:
    with pytest.raises(ValueError, match=r"got 2; write \['cpu:0', 'cpu:1'\]"):
        td.MirroredStrategy(2)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [float, lambda v: v + 1, lambda v: v < 2, lambda v: v[0]])
def test_a_result_to_come_is_no_number(use: Callable[[Any], Any]) -> None:
    value = RemoteValue(threading.Condition())
    assert value  # it may be asked whether there is one
    with pytest.raises(TypeError, match=r"Write value\.fetch\(\)"):
        use(value)
