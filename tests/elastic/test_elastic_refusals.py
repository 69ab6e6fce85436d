"""What an elastic strategy refuses, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as tfd

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "at least 2, got 0. With one replica"),
        ({"replicas": 2, "min_workers": 3}, "no more workers than replicas"),
        ({"replicas": 2, "beat_every": 9.0}, "beat_every must be positive and the smaller"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfd.experimental.Elastic(**options)


def test_what_is_no_number_or_no_options_is_refused() -> None:
    with pytest.raises(TypeError, match="whole number"):
        tfd.experimental.Elastic(replicas="4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"experimental.Elastic"):
        tfd.MultiWorkerMirroredStrategy(elastic=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be at least 2, got 1"):
        tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=1))
    with pytest.raises(ValueError, match="neither devices"):
        tfd.MultiWorkerMirroredStrategy(devices=["cpu:0"], elastic=tfd.experimental.Elastic(replicas=2))


def test_more_workers_than_replicas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = '{"cluster": {"worker": ["h:1", "h:2", "h:3"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(ValueError, match="3 workers and Elastic"):
        tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2))


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun, whose agent ends the survivors"):
        tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2))


def test_lbfgs_is_refused_outside_of_a_run_too(strategy: Any) -> None:
    """Each worker would make steps of its own."""
    with strategy.scope():
        model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match=r"LBFGS calls its closure a different number of times"):
        optimizer.step(lambda: model(torch.ones(4, 6)).sum())


def test_gradients_left_for_the_next_run_are_refused(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.Linear(6, 2)

    def step() -> None:
        with strategy.accumulate():
            model(torch.randn(4, 6)).sum().backward()

    with pytest.raises(NotImplementedError, match="not reduced by the end"):
        strategy.run(step)


def test_modules_and_variables_made_in_a_step_are_refused(strategy: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"Create variables in strategy\.scope"):
        strategy.run(lambda: tfd.Variable(1.0))


def test_lazy_modules_that_were_not_run_are_refused(strategy: Any) -> None:
    with strategy.scope():
        model = torch.nn.LazyLinear(2)
    with pytest.raises(NotImplementedError, match="run a lazy module once"):
        strategy.run(lambda: model(torch.ones(1, 3)))


def test_results_that_cannot_be_sent_are_refused(strategy: Any) -> None:
    with pytest.raises(TypeError, match="returned a object"):
        strategy.run(object)
