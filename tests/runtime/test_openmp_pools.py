"""Pools of OpenMP end with the turn of a replica where runs are faster so."""

import os
import time
from pathlib import Path

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.ops.threads import can_end_pools, end_pool
from tfstyle_dist.runtime import openmp_pools
from tfstyle_dist.runtime.openmp_pools import OpenMPPools

needs_gnu = pytest.mark.skipif(not can_end_pools(), reason="torch has no OpenMP of GNU here")


class Clock:
    """Runs that take as long as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr(openmp_pools.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(openmp_pools, "can_end_pools", lambda: True)
        monkeypatch.setattr(openmp_pools, "_CORES", 2)
        torch.set_num_threads(2)

    def runs(
        self, pools: OpenMPPools, count: int, staying: float, ending: float, others: float = 0.0, counts: bool = True
    ) -> list[bool]:
        """Whether pools ended; ``others``: what each second run takes, however pools end; 0: they are as the first."""
        said = []
        for number in range(count):
            said.append(pools.begin())
            self.now += others if others and number % 2 else ending if said[-1] else staying
            pools.finish(counts)
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_pools_end_where_runs_take_less_time_so(clock: Clock) -> None:
    pools = OpenMPPools(2)
    said = clock.runs(pools, 60, staying=10.0, ending=5.0)
    assert not any(said[:24])  # before the trial, and in its first part
    assert said[24:32] == [True] * 8
    assert said[32:40] == [False] * 8
    assert all(said[40:])


@pytest.mark.parametrize(("staying", "ending"), [(10.0, 10.0), (10.0, 9.5), (1.0, 1.4)])
def test_pools_stay_where_little_or_nothing_is_gained(clock: Clock, staying: float, ending: float) -> None:
    said = clock.runs(OpenMPPools(2), 60, staying, ending)
    assert sum(said) == 8


def test_a_trial_is_over_at_the_first_run_that_takes_far_longer(clock: Clock) -> None:
    pools = OpenMPPools(2)
    assert sum(clock.runs(pools, 60, staying=5.0, ending=70.0)) == 1


def test_trials_become_rare(clock: Clock) -> None:
    pools = OpenMPPools(2)
    said = clock.runs(pools, 20_000, staying=5.0, ending=70.0)
    assert 5 < sum(said) < 12


def test_pools_stay_again_when_runs_take_longer_than_they_did(clock: Clock) -> None:
    pools = OpenMPPools(2)
    clock.runs(pools, 40, staying=10.0, ending=5.0)
    assert sum(clock.runs(pools, 30, staying=10.0, ending=70.0)) == 12  # others use the cores now


@pytest.mark.parametrize("others", [1.0, 4.0])
def test_runs_of_two_kinds_are_compared_with_both_kinds(clock: Clock, others: float) -> None:
    pools = OpenMPPools(2)
    assert sum(clock.runs(pools, 60, staying=10.0, ending=13.0, others=others)) == 8
    assert all(clock.runs(OpenMPPools(2), 60, staying=10.0, ending=5.0, others=others)[40:])


def test_runs_that_raise_do_not_count(clock: Clock) -> None:
    assert not any(clock.runs(OpenMPPools(2), 100, staying=10.0, ending=5.0, counts=False))


def test_a_run_within_a_run_does_as_that_one(clock: Clock) -> None:
    pools = OpenMPPools(2)
    clock.runs(pools, 60, staying=10.0, ending=5.0)
    assert [pools.begin(), pools.begin()] == [True, True]


def test_a_few_slow_runs_change_nothing(clock: Clock) -> None:
    pools = OpenMPPools(2)
    clock.runs(pools, 40, staying=10.0, ending=5.0)
    for ending in (70.0, *[5.0] * 11) * 3:
        assert clock.runs(pools, 1, staying=10.0, ending=ending) == [True]


@pytest.mark.parametrize(("threads", "cores"), [(1, 2), (2, 3), (4, 7)])
def test_nothing_is_tried_where_no_pool_sleeps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, threads: int, cores: int
) -> None:
    torch.set_num_threads(threads)
    monkeypatch.setattr(openmp_pools, "_CORES", cores)
    assert not any(clock.runs(OpenMPPools(2), 100, staying=10.0, ending=5.0))


def _train(monkeypatch: pytest.MonkeyPatch, ends: bool) -> tuple[torch.Tensor, list[int]]:
    """The weights after three steps, and how many of its pool's threads each turn left to the next one."""
    monkeypatch.setattr(OpenMPPools, "begin", lambda self: ends)
    torch.set_num_threads(2)
    torch.manual_seed(0)
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(300, 300)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made, left = list[set[str]](), list[int]()

    def tasks() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def step(x: torch.Tensor) -> None:
        patience = time.monotonic() + (10 if ends else 0)  # the system lists a thread for a moment after its end
        while made and made[-1] & tasks() and time.monotonic() < patience:
            time.sleep(0.001)
        before = tasks()
        if made:
            left.append(len(made[-1] & before))
        for _ in range(3):
            x = x.relu()  # large enough for two threads
        made.append(tasks() - before)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    inputs = [torch.randn(1000, 300) for _ in range(2)]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: inputs[context.replica_id_in_sync_group]
    )
    for _ in range(3):
        strategy.run(step, args=(values,))
    weights = model.weight.detach().clone()
    strategy.close()
    return weights, left


@needs_gnu
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="nothing lists the threads of a process here")
def test_the_threads_of_a_replica_end_with_its_turn_and_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, left = _train(monkeypatch, ends=True)
    stayed, there = _train(monkeypatch, ends=False)
    assert not any(left)
    assert any(there)
    assert torch.equal(ended, stayed)


@needs_gnu
def test_a_forked_process_ends_no_pool() -> None:
    child = os.fork()
    if child == 0:
        end_pool()
        os._exit(int(can_end_pools()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
