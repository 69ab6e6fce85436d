"""Bits that flip in the memory of one worker are found, named, and gone after it has come back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from elastic_train import flip_a_bit

import tfstyle_dist as tfd
from tfstyle_dist.elastic.audit import differing, digest

pytestmark = pytest.mark.timeout(600)


def test_a_worker_with_a_flipped_bit_is_given_up_and_comes_back(run_job: Any) -> None:
    (alone,) = run_job(1, "transformer", 8)
    assert alone["code"] == 0, alone["output"]
    job = run_job(4, "transformer", 8, "2:3:flip", restarts={2: 1}, CHECK="1", REJOIN="4")
    for worker in job:
        assert worker["code"] == 0, worker["output"]
        for name in ("weights", "buffers", "seen"):
            assert worker["result"][name] == alone["result"][name]
    assert "Worker 2 differs from most others in step" in job[2]["output"]
    assert "(worker 2 in 0.self_attn.in_proj_weight)" in job[2]["output"]
    assert "worker 2 in 0.self_attn.in_proj_weight differs from the others" in job[0]["output"]
    assert job[2]["result"]["joined"]


@pytest.fixture
def trained() -> Iterator[Any]:
    torch.manual_seed(5)
    elastic = tfd.experimental.Elastic(replicas=4, check_every=1)
    with tfd.MultiWorkerMirroredStrategy(elastic=elastic) as strategy:
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            total = tfd.Variable(torch.zeros(3), aggregation=tfd.VariableAggregation.SUM)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            total.assign_add(torch.ones(3))

        for _ in range(3):
            strategy.run(step)
        yield strategy, step


def test_every_flipped_bit_is_found_and_named(trained: Any) -> None:
    strategy, _ = trained
    audit, chance = strategy._elastic_steps.job.audit, random.Random(3)
    copies = {r: list(audit._tensors(r)) for r in range(4)}
    before = [[digest(tensor) for *_, tensor in copies[r]] for r in range(4)]
    assert before[0] == before[1] == before[2] == before[3]
    assert len(before[0]) == 4 + 3 * 4 + 1
    for _ in range(1000):
        replica, number = chance.randrange(4), chance.randrange(len(before[0]))
        tensor = copies[replica][number][-1]
        bit = chance.randrange(tensor.nbytes * 8)
        flip_a_bit(tensor, bit)
        after = {r: [[digest(t) for *_, t in copies[r]]] for r in range(4)}
        assert differing(after) == {replica: number}
        flip_a_bit(tensor, bit)


def test_small_steps_between_do_not_put_off_the_comparison(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, step = trained
    job, asked = strategy._elastic_steps.job, []
    job.audit._every = 2
    gather = job.membership.gather
    monkeypatch.setattr(job.membership, "gather", lambda kind, packet: asked.append(kind) or gather(kind, packet))
    for _ in range(6):
        strategy.should_stop(False)
        strategy.run(step)
    assert asked.count("comparison of all copies") == 3


def test_one_worker_alone_cannot_say_which_copy_is_right(trained: Any) -> None:
    strategy, step = trained
    audit = strategy._elastic_steps.job.audit
    _, name, tensor = list(audit._tensors(2))[5]
    flip_a_bit(tensor)
    with pytest.raises(tfd.errors.DataLossError, match=f"worker 0 in {name}.*no majority"):
        strategy.run(step)


def test_who_is_right() -> None:
    assert differing({0: [[1, 2]], 1: [[1, 2]], 2: [[1, 2], [1, 2]]}) == {}
    assert differing({0: [[1, 2]], 1: [[1, 3]], 2: [[1, 2]]}) == {1: 1}
    assert differing({0: [[1, 2]], 1: [[4, 2]]}) == {0: 0, 1: 0}
    assert differing({0: [[1, 2]], 1: [[1, 2], [4, 2]]}) == {1: 0}
    assert differing({0: [[1, 2], [1, 3]]}) == {0: 1}
    assert differing({0: [[1]], 1: [[1, 2]], 2: [[1]]}) == {1: 1}
