"""The lane through shared memory: sums, comparisons, and workers that go away."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.comm.shared_lane import SLOT_BYTES, LaneError, SharedLane, create_segment, remove_segment
from tfstyle_dist.ops import aggregate, aggregate_into

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the lane needs x86-64")
Open = Callable[[int], list[SharedLane]]


@pytest.fixture
def open_lanes() -> Open:
    def build(size: int, state: str = "running", timeout: float = 20) -> list[SharedLane]:
        path = create_segment(size)
        assert path is not None
        assert Path(path).stat().st_mode & 0o777 == 0o600
        limit = timedelta(seconds=timeout)
        lanes = [SharedLane(path, r, size, limit, lambda rank: state) for r in range(size)]
        remove_segment(path)
        assert not Path(path).exists()  # nothing can be left behind, however the workers end
        return lanes

    return build


def together(lanes: list[SharedLane], call: Callable[[SharedLane], object]) -> list[object]:
    """Each lane in a thread of its own, as if it were a process."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(call, lanes))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_in_rank_order(open_lanes: Open, size: int, dtype: torch.dtype) -> None:
    limit = SLOT_BYTES // dtype.itemsize
    lanes = open_lanes(size)
    for count in (0, 1, size - 1, 1000, limit, limit + 1, 2 * limit + 3):
        parts = [(torch.randn(count) * 100).to(dtype) for _ in range(size)]
        expected = aggregate(parts)
        buffers = [p.clone() for p in parts]
        assert (
            together(lanes, lambda lane, b=buffers: lane.all_reduce(b[lane.rank], 7, aggregate_into)) == [True] * size
        )
        for buffer in buffers:
            torch.testing.assert_close(buffer, expected, rtol=0, atol=0)


def test_many_meetings_of_workers_that_run_ahead(open_lanes: Open) -> None:
    lanes = open_lanes(3)

    def work(lane: SharedLane) -> list[float]:
        seen = []
        for number in range(300):
            if number % 3 == lane.rank:
                threading.Event().wait(0.0005)
            value = torch.full((5,), float(number + lane.rank))
            assert lane.all_reduce(value, number, aggregate_into)
            same, numbers = lane.compare(number, number * 10 + lane.rank)
            assert same
            assert numbers == [number * 10 + r for r in range(3)]
            seen.append(float(value[4]))
        return seen

    for seen in together(lanes, work):
        assert seen == [3.0 * n + 3 for n in range(300)]


def test_different_calls_are_noticed_by_all_and_change_nothing(open_lanes: Open) -> None:
    lanes = open_lanes(3)

    def work(lane: SharedLane) -> tuple[bool, bool, float]:
        value = torch.ones(4)
        first = lane.all_reduce(value, 1 if lane.rank < 2 else 2, aggregate_into)
        untouched = float(value.sum())
        second = lane.all_reduce(value, 3, aggregate_into)
        return first, second, untouched + float(value.sum())

    assert together(lanes, work) == [(False, True, 4.0 + 12.0)] * 3


def test_a_worker_that_left_or_died_or_is_late_ends_the_wait(open_lanes: Open) -> None:
    here, other = open_lanes(2)
    other.leave()
    with pytest.raises(LaneError, match="worker 1 of this host has left"):
        here.compare(1)
    with pytest.raises(LaneError, match="worker 1 of this host has left"):
        open_lanes(2, state="dead")[0].compare(1)  # type: ignore[call-arg]
    with pytest.raises(LaneError, match=r"timed out after 0\.2 s waiting for worker 1 of this host"):
        open_lanes(2, timeout=0.2)[0].compare(1)  # type: ignore[call-arg]


@pytest.mark.distributed(workers=3, timeout=60)
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_use_it_unless_told_not_to(shared: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", str(int(shared)))
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        assert (group._lane is not None) == shared  # type: ignore[attr-defined]
        parts = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(3)]
        mine = parts[rank].clone()
        group.all_reduce(mine, "test")
        if shared:
            torch.testing.assert_close(mine, aggregate(parts), rtol=0, atol=0)
        else:
            torch.testing.assert_close(mine, aggregate(parts))
