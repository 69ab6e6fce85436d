"""What samples and steps draw, of torch, Python and numpy, does not depend on who lives."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.core.logging import _said
from tfstyle_dist.elastic.state.python_random import described, state_of
from tfstyle_dist.runtime.random_streams import python_state, set_python_state

SCRIPT = "drawing_steps.py"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("sampler", "comes_back"),
    [  # in the middle of an epoch
        ("shuffled", 5),
        ("weighted", 4),
        ("in order", 4),
        ("shuffled by processes", 5),
        ("in order by processes", 5),
        ("stream by processes", 8),
    ],
)
def test_a_worker_that_comes_back_draws_what_the_others_draw(run_job: Any, sampler: str, comes_back: int) -> None:
    (alone,) = run_job(1, sampler, -1, script=SCRIPT)
    assert alone["code"] == 0, alone["output"]
    job = run_job(2, sampler, 1, script=SCRIPT, restarts={1: 1}, limit=40, REJOIN=str(comes_back), WORKERS="2")
    for index, worker in enumerate(job):
        assert worker["code"] == 0, worker["output"]
        *found, joined = worker["result"]
        assert found == alone["result"][:-1]
        assert joined == (index == 1)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, torch.rand])
@pytest.mark.parametrize("seeded", [True, False])
def test_numbers_of_a_step_that_are_not_exact_are_said_once(
    strategy: Any, caplog: pytest.LogCaptureFixture, draw: Any, seeded: bool
) -> None:
    _said.discard("elastic python numbers")
    if seeded:
        strategy.seed_replicas(3, python=True)

    def step() -> None:
        draw(1) if draw is torch.rand else draw()

    for _ in range(3):
        strategy.run(step)
    said = [record for record in caplog.records if "seed_replicas(seed, python=True)" in record.message]
    assert len(said) == int(not seeded and draw is not torch.rand)


def test_each_replica_draws_the_same_from_python_whoever_holds_it() -> None:
    found = []
    for _ in range(2):
        with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
            strategy.seed_replicas(3, python=True)
            own = random.getstate()

            def step() -> torch.Tensor:
                value = torch.tensor([random.random(), np.random.rand()])
                tfd.get_replica_context().all_reduce("SUM", value)
                return torch.cat([value, torch.tensor([random.random(), np.random.rand()])])

            runs = [strategy.experimental_local_results(strategy.run(step)) for _ in range(2)]
            assert random.getstate() == own
            found.append([value.tolist() for run in runs for value in run])
    assert found[0] == found[1]
    assert len({number for values in found[0] for number in values}) == 16


def test_python_has_one_stream_again_where_seeds_are_given_without_it(strategy: Any) -> None:
    strategy.seed_replicas(3, python=True)
    strategy.run(random.random)
    strategy.seed_replicas(3)
    random.seed(1)
    found = strategy.experimental_local_results(strategy.run(random.random))
    expected = random.Random(1)
    assert list(found) == [expected.random() for _ in found]


def test_an_optimizer_that_draws_from_numpy_draws_the_same_for_all(strategy: Any) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter += float(np.random.rand())

    strategy.seed_replicas(3, python=True)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = Noisy(model.parameters(), lr=0.1)

    def step() -> tuple[torch.Tensor, float]:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone(), np.random.rand()

    for _ in range(2):
        weights, own = strategy.run(step)
        assert all(torch.equal(weight, weights.values[0]) for weight in weights.values)
        assert len(set(own.values)) == len(own.values)


def test_the_state_of_any_generator_of_numpy_is_told() -> None:
    before = np.random.get_bit_generator()
    try:
        for generator in (np.random.MT19937(3), np.random.PCG64(3)):
            np.random.set_bit_generator(generator)
            np.random.randn(3), random.gauss(0, 1)
            told = json.loads(json.dumps(described(python_state())))
            numbers = np.random.randn(3).tolist(), random.gauss(0, 1)
            set_python_state(state_of(told))
            assert (np.random.randn(3).tolist(), random.gauss(0, 1)) == numbers
    finally:
        np.random.set_bit_generator(before)
