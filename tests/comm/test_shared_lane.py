"""The lane through shared memory: sums, comparisons, and workers that go away."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.comm.host_memory import shared_lane
from tfstyle_dist.comm.host_memory.compiled import Said
from tfstyle_dist.comm.host_memory.shared_lane import SLOT_BYTES, LaneError, SharedLane, create_segment
from tfstyle_dist.core.errors import PeerLostError
from tfstyle_dist.gradients.pieces import GradientPieces
from tfstyle_dist.ops import aggregate, aggregate_into, backends, lane_sums
from tfstyle_dist.ops.cost_model import ORDERS
from tfstyle_dist.ops.lane_sums import find_lane_sum
from tfstyle_dist_kernels.cpu import cpu_exchange

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the lane needs x86-64")
Open = Callable[[int], list[SharedLane]]


@pytest.fixture
def open_lanes() -> Open:
    def build(size: int, gone: bool = False, timeout: float = 20) -> list[SharedLane]:
        handle = create_segment(size)
        assert handle is not None
        limit = timedelta(seconds=timeout)
        lanes = [SharedLane(handle, r, size, limit, lambda rank: gone) for r in range(size)]
        os.close(handle)
        return lanes

    return build


def together(lanes: list[SharedLane], call: Callable[[SharedLane], object]) -> list[object]:
    """Each lane in a thread of its own, as if it were a process."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(call, lanes))


def not_called(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    raise AssertionError("this sum is compiled")


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
        open_lanes(2, gone=True)[0].compare(1)  # type: ignore[call-arg]
    with pytest.raises(LaneError, match=r"timed out after 0\.2 s waiting for worker 1 of this host"):
        open_lanes(2, timeout=0.2)[0].compare(1)  # type: ignore[call-arg]


def test_after_different_calls_the_slots_are_used_in_the_same_turn(open_lanes: Open) -> None:
    lanes = open_lanes(2)

    def work(lane: SharedLane) -> list[float]:
        value = torch.ones(4)
        same = lane.all_reduce(value, 1, aggregate_into) if lane.rank == 0 else lane.compare(2)[0]
        assert not same
        sums = []
        for number in range(4):
            value = torch.full((4,), float(10 * number + lane.rank))
            assert lane.all_reduce(value, 3, aggregate_into)
            sums.append(float(value[3]))
        return sums

    assert together(lanes, work) == [[1.0, 21.0, 41.0, 61.0]] * 2


class TestCompiledSums:
    """Two workers or more, of whom all, some or none use the compiled form of their sum."""

    @pytest.fixture(autouse=True)
    def prepared(self) -> None:
        for dtype in (torch.float32, torch.float64):
            for size in (2, 3, 5):
                cpu_exchange.prepare(dtype, size)

    @pytest.fixture
    def pair(self, open_lanes: Open) -> list[SharedLane]:
        return self.compiled(open_lanes, 2)

    @staticmethod
    def compiled(open_lanes: Open, size: int) -> list[SharedLane]:
        lanes = open_lanes(size)
        for lane in lanes:
            lane.use_compiled(find_lane_sum)
        return lanes

    def test_both_sides_give_its_answers_the_same_numbers(self) -> None:
        assert [Said.DONE, Said.WAITS, Said.WAKES, Said.DIFFERS] == [
            cpu_exchange.DONE,
            cpu_exchange.WAITS,
            cpu_exchange.WAKES,
            cpu_exchange.DIFFERS,
        ]

    @pytest.mark.parametrize("compiled", [(0, 1), (0,), (1,), (0, 1, 2), (1, 2), (0, 1, 2, 3, 4), (3,)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_bits_of_the_lane_itself(self, open_lanes: Open, compiled: tuple[int, ...], dtype: torch.dtype) -> None:
        size = next(s for s in (2, 3, 5) if s > max(compiled))
        lanes = open_lanes(size)
        for rank in compiled:
            lanes[rank].use_compiled(find_lane_sum)
        part = SLOT_BYTES // dtype.itemsize
        for sizes in ([20_000], [part], [part + 1], [3, part - 3, 5000], [0, 1, 7, 0, 2 * part + 3, 31, 33, 0]):
            shapes = [torch.Size([n]) for n in sizes]
            parts = [[torch.randn(s, dtype=dtype) * 10 ** torch.randn(s, dtype=dtype) for s in shapes] for _ in lanes]
            parts[0][-2 if len(sizes) > 2 else 0][:3] = torch.tensor([float("nan"), float("inf"), 5e-324])
            expected = [aggregate(list(column), divisor=size) for column in zip(*parts, strict=True)]

            def work(lane: SharedLane, shapes: list[torch.Size] = shapes, parts: object = parts) -> bool:
                pieces = GradientPieces(shapes, dtype, size)
                pieces.grads = parts[lane.rank]  # type: ignore[index]
                return lane.all_reduce(pieces, 7, aggregate_into)

            assert together(lanes, work) == [True] * size
            for mine in parts:
                for value, right in zip(mine, expected, strict=True):
                    torch.testing.assert_close(value, right, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("method", [td.AggregationMethod.TREE, td.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N])
    def test_order_of_the_method(self, open_lanes: Open, method: int) -> None:
        cpu_exchange.prepare(torch.float32, 5, ORDERS[method])
        lanes = self.compiled(open_lanes, 5)
        parts = [torch.randn(50_000) for _ in lanes]
        values = [p.clone() for p in parts]

        def work(lane: SharedLane) -> bool:
            return lane.all_reduce(values[lane.rank], 7, not_called, method=method)

        assert together(lanes, work) == [True] * 5
        for value in values:
            torch.testing.assert_close(value, aggregate(parts, method), rtol=0, atol=0)

    def test_many_sums_of_workers_that_sleep_and_run_ahead(self, open_lanes: Open) -> None:
        lanes = self.compiled(open_lanes, 3)

        def work(lane: SharedLane) -> list[float]:
            seen = []
            for number in range(60):
                if number % 3 == lane.rank:
                    threading.Event().wait(0.001)
                value = torch.full((20_000 + number,), float(number + lane.rank))
                assert lane.all_reduce(value, number, not_called)
                assert lane.compare(number)[0]
                seen.append(float(value[-1]))
            return seen

        assert together(lanes, work) == [[3.0 * n + 3 for n in range(60)]] * 3

    def test_it_is_used(self, pair: list[SharedLane], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SharedLane, "_slots_of", None)  # what the lane's own sum would need
        values = [torch.full((5000,), 1.0 + lane.rank) for lane in pair]
        assert together(pair, lambda lane: lane.all_reduce(values[lane.rank], 7, not_called)) == [True, True]
        assert all(bool((v == 3).all()) for v in values)

    def test_gradients_that_are_not_contiguous_take_the_other_way(self, pair: list[SharedLane]) -> None:
        grads = [torch.randn(100, 90).t() for _ in pair]
        expected = (grads[0] + grads[1]) / 2

        def work(lane: SharedLane) -> bool:
            pieces = GradientPieces([torch.Size([90, 100])], torch.float32, 2)
            pieces.grads = [grads[lane.rank]]
            return lane.all_reduce(pieces, 7, aggregate_into)

        assert together(pair, work) == [True, True]
        for grad in grads:
            torch.testing.assert_close(grad, expected, rtol=0, atol=0)

    def test_one_that_comes_late_and_one_that_sleeps(self, pair: list[SharedLane]) -> None:
        def work(lane: SharedLane) -> float:
            value = torch.ones(300_000)
            for number in range(6):
                if number % 2 == lane.rank:
                    threading.Event().wait(0.05)  # the other has gone to sleep by then
                assert lane.all_reduce(value, number, aggregate_into)
            return float(value.sum())

        assert together(pair, work) == [300_000.0 * 64] * 2

    def test_a_worker_of_several_makes_another_call(self, open_lanes: Open) -> None:
        lanes = self.compiled(open_lanes, 3)

        def work(lane: SharedLane) -> tuple[bool, float, float]:
            value = torch.full((200_000,), 1.0 + lane.rank)
            same = lane.compare(9)[0] if lane.rank == 1 else lane.all_reduce(value, 8, not_called)
            before = float(value[0])
            assert lane.all_reduce(value, 5, not_called)
            return same, before, float(value[-1])

        assert together(lanes, work) == [(False, 1.0, 6.0), (False, 2.0, 6.0), (False, 3.0, 6.0)]

    def test_one_of_several_leaves(self, open_lanes: Open) -> None:
        lanes = self.compiled(open_lanes, 3)
        lanes[2].leave()

        def work(lane: SharedLane) -> None:
            with pytest.raises(LaneError, match="worker 2 of this host has left"):
                lane.all_reduce(torch.ones(200_000), 1, not_called)

        together(lanes[:2], work)

    def test_different_calls_change_nothing_and_the_next_ones_are_right(self, pair: list[SharedLane]) -> None:
        def work(lane: SharedLane) -> tuple[bool, float, float]:
            value = torch.full((5000,), 1.0 + lane.rank)
            same = lane.all_reduce(value, lane.rank, aggregate_into)
            before = float(value[0])
            assert lane.all_reduce(value, 5, aggregate_into)
            return same, before, float(value[4999])

        assert together(pair, work) == [(False, 1.0, 3.0), (False, 2.0, 3.0)]

    def test_the_other_leaves(self, pair: list[SharedLane]) -> None:
        pair[1].leave()
        with pytest.raises(LaneError, match="worker 1 of this host has left"):
            pair[0].all_reduce(torch.ones(5000), 1, aggregate_into)


@pytest.mark.distributed(workers=2, timeout=90)
def test_ranks_compile_the_pair_when_it_pays(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "COMPILING_SECONDS", 1e-9)
    monkeypatch.setattr(lane_sums, "_warm_up", backends.WarmUp("cpu.cpu_exchange"))
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        for _ in range(2000):
            value = torch.full((30_000,), 1.0 + rank)
            group.all_reduce(value, "test")
            assert bool((value == 3).all())
            if all(group.numbers(int(bool(group._memory.lane._compiled._found)), "loaded")):  # type: ignore[attr-defined]
                return
    pytest.fail("it was not compiled")


@pytest.mark.distributed(workers=3, timeout=60)
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_use_it_unless_told_not_to(shared: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", str(int(shared)))
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        assert (group._memory is not None) == shared  # type: ignore[attr-defined]
        parts = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(3)]
        mine = parts[rank].clone()
        group.all_reduce(mine, "test")
        if shared:
            torch.testing.assert_close(mine, aggregate(parts), rtol=0, atol=0)
        else:
            torch.testing.assert_close(mine, aggregate(parts))


@pytest.mark.parametrize(
    "killed",
    [pytest.param(r, marks=pytest.mark.distributed(workers=2, timeout=60, deadline=15, may_die=(r,))) for r in (0, 1)],
)
def test_nothing_is_left_of_one_that_is_killed_while_it_maps_the_memory(
    killed: int, rank: int, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mapping:
        @staticmethod
        def mmap(*arguments: Any) -> None:
            ranks.kill(rank)

    before = set(Path("/dev/shm").iterdir())
    if rank == killed:
        monkeypatch.setattr(shared_lane, "mmap", Mapping)
    with pytest.raises(PeerLostError):
        td.MirroredStrategy()
    assert {path for path in Path("/dev/shm").iterdir() if path.name.startswith("tfstyle-")} <= before
