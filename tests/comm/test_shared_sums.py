"""Sums in the memory of a host: bits, comparisons, and workers that go away."""

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
from tfstyle_dist.comm.host_memory import shared_sums
from tfstyle_dist.comm.host_memory.compiled_sums import Said
from tfstyle_dist.comm.host_memory.shared_sums import STAGING_BYTES, SharedSums, create_segment
from tfstyle_dist.core.errors import PeerLostError
from tfstyle_dist.gradients.bucket_views import BucketViews
from tfstyle_dist.ops import aggregate, aggregate_into, backends, host_sums
from tfstyle_dist.ops.cost_model import ORDERS
from tfstyle_dist.ops.host_sums import find_host_sum
from tfstyle_dist.shm.barrier import BarrierError
from tfstyle_dist_kernels.cpu import cpu_exchange, cpu_request

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory needs x86-64")
Open = Callable[[int], list[SharedSums]]


@pytest.fixture
def open_sums() -> Open:
    def build(size: int, gone: bool = False, timeout: float = 20) -> list[SharedSums]:
        handle = create_segment(size)
        assert handle is not None
        limit = timedelta(seconds=timeout)
        workers = [SharedSums(handle, r, size, limit, lambda rank: gone) for r in range(size)]
        os.close(handle)
        return workers

    return build


def together(workers: list[SharedSums], call: Callable[[SharedSums], object]) -> list[object]:
    """Each worker in a thread of its own, as if it were a process."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(call, workers))


def not_called(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    raise AssertionError("this sum is compiled")


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_in_rank_order(open_sums: Open, size: int, dtype: torch.dtype) -> None:
    limit = STAGING_BYTES // dtype.itemsize
    workers = open_sums(size)
    for count in (0, 1, size - 1, 1000, limit, limit + 1, 2 * limit + 3):
        parts = [(torch.randn(count) * 100).to(dtype) for _ in range(size)]
        expected = aggregate(parts)
        buffers = [p.clone() for p in parts]
        assert (
            together(workers, lambda worker, b=buffers: worker.all_reduce(b[worker.rank], 7, aggregate_into))
            == [True] * size
        )
        for buffer in buffers:
            torch.testing.assert_close(buffer, expected, rtol=0, atol=0)


def test_many_barriers_of_workers_that_run_ahead(open_sums: Open) -> None:
    workers = open_sums(3)

    def work(worker: SharedSums) -> list[float]:
        seen = []
        for number in range(300):
            if number % 3 == worker.rank:
                threading.Event().wait(0.0005)
            value = torch.full((5,), float(number + worker.rank))
            assert worker.all_reduce(value, number, aggregate_into)
            same, numbers = worker.barrier.compare(number, number * 10 + worker.rank)
            assert same
            assert numbers == [number * 10 + r for r in range(3)]
            seen.append(float(value[4]))
        return seen

    for seen in together(workers, work):
        assert seen == [3.0 * n + 3 for n in range(300)]


def test_different_calls_are_noticed_by_all_and_change_nothing(open_sums: Open) -> None:
    workers = open_sums(3)

    def work(worker: SharedSums) -> tuple[bool, bool, float]:
        value = torch.ones(4)
        first = worker.all_reduce(value, 1 if worker.rank < 2 else 2, aggregate_into)
        untouched = float(value.sum())
        second = worker.all_reduce(value, 3, aggregate_into)
        return first, second, untouched + float(value.sum())

    assert together(workers, work) == [(False, True, 4.0 + 12.0)] * 3


def test_a_worker_that_left_or_died_or_is_late_ends_the_wait(open_sums: Open) -> None:
    here, other = open_sums(2)
    other.barrier.leave()
    with pytest.raises(BarrierError, match="worker 1 of this host has left"):
        here.barrier.compare(1)
    with pytest.raises(BarrierError, match="worker 1 of this host has left"):
        open_sums(2, gone=True)[0].barrier.compare(1)  # type: ignore[call-arg]
    with pytest.raises(BarrierError, match=r"timed out after 0\.2 s waiting for worker 1 of this host"):
        open_sums(2, timeout=0.2)[0].barrier.compare(1)  # type: ignore[call-arg]


def test_after_different_calls_the_staging_areas_are_used_in_the_same_turn(open_sums: Open) -> None:
    workers = open_sums(2)

    def work(worker: SharedSums) -> list[float]:
        value = torch.ones(4)
        same = worker.all_reduce(value, 1, aggregate_into) if worker.rank == 0 else worker.barrier.compare(2)[0]
        assert not same
        sums = []
        for number in range(4):
            value = torch.full((4,), float(10 * number + worker.rank))
            assert worker.all_reduce(value, 3, aggregate_into)
            sums.append(float(value[3]))
        return sums

    assert together(workers, work) == [[1.0, 21.0, 41.0, 61.0]] * 2


class TestCompiledSums:
    """Two workers or more, of whom all, some or none use the compiled form of their sum."""

    @pytest.fixture(autouse=True)
    def prepared(self) -> None:
        for dtype in (torch.float32, torch.float64):
            for size in (2, 3, 5):
                cpu_exchange.prepare(dtype, size)

    @pytest.fixture
    def pair(self, open_sums: Open) -> list[SharedSums]:
        return self.compiled(open_sums, 2)

    @staticmethod
    def compiled(open_sums: Open, size: int) -> list[SharedSums]:
        workers = open_sums(size)
        for worker in workers:
            worker.use_compiled(find_host_sum)
        return workers

    def test_both_sides_give_its_answers_the_same_numbers(self) -> None:
        assert list(Said) == [cpu_request.DONE, cpu_request.WAITS, cpu_request.DIFFERS]

    @pytest.mark.parametrize("compiled", [(0, 1), (0,), (1,), (0, 1, 2), (1, 2), (0, 1, 2, 3, 4), (3,)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_bits_of_the_uncompiled_sum(self, open_sums: Open, compiled: tuple[int, ...], dtype: torch.dtype) -> None:
        size = next(s for s in (2, 3, 5) if s > max(compiled))
        workers = open_sums(size)
        for rank in compiled:
            workers[rank].use_compiled(find_host_sum)
        part = STAGING_BYTES // dtype.itemsize
        for sizes in ([20_000], [part], [part + 1], [3, part - 3, 5000], [0, 1, 7, 0, 2 * part + 3, 31, 33, 0]):
            shapes = [torch.Size([n]) for n in sizes]
            parts = [[torch.randn(s, dtype=dtype) * 10 ** torch.randn(s, dtype=dtype) for s in shapes] for _ in workers]
            parts[0][-2 if len(sizes) > 2 else 0][:3] = torch.tensor([float("nan"), float("inf"), 5e-324])
            expected = [aggregate(list(column), divisor=size) for column in zip(*parts, strict=True)]

            def work(worker: SharedSums, shapes: list[torch.Size] = shapes, parts: object = parts) -> bool:
                views = BucketViews(shapes, dtype, size)
                views.grads = parts[worker.rank]  # type: ignore[index]
                return worker.all_reduce(views, 7, aggregate_into)

            assert together(workers, work) == [True] * size
            for mine in parts:
                for value, right in zip(mine, expected, strict=True):
                    torch.testing.assert_close(value, right, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("method", [td.AggregationMethod.TREE, td.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N])
    def test_order_of_the_method(self, open_sums: Open, method: int) -> None:
        cpu_exchange.prepare(torch.float32, 5, ORDERS[method])
        workers = self.compiled(open_sums, 5)
        parts = [torch.randn(50_000) for _ in workers]
        values = [p.clone() for p in parts]

        def work(worker: SharedSums) -> bool:
            return worker.all_reduce(values[worker.rank], 7, not_called, method=method)

        assert together(workers, work) == [True] * 5
        for value in values:
            torch.testing.assert_close(value, aggregate(parts, method), rtol=0, atol=0)

    def test_many_sums_of_workers_that_sleep_and_run_ahead(self, open_sums: Open) -> None:
        workers = self.compiled(open_sums, 3)

        def work(worker: SharedSums) -> list[float]:
            seen = []
            for number in range(60):
                if number % 3 == worker.rank:
                    threading.Event().wait(0.001)
                value = torch.full((20_000 + number,), float(number + worker.rank))
                assert worker.all_reduce(value, number, not_called)
                assert worker.barrier.compare(number)[0]
                seen.append(float(value[-1]))
            return seen

        assert together(workers, work) == [[3.0 * n + 3 for n in range(60)]] * 3

    def test_it_is_used(self, pair: list[SharedSums], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SharedSums, "_staging_of", None)  # what the uncompiled sum would need
        values = [torch.full((5000,), 1.0 + worker.rank) for worker in pair]
        assert together(pair, lambda worker: worker.all_reduce(values[worker.rank], 7, not_called)) == [True, True]
        assert all(bool((v == 3).all()) for v in values)

    def test_gradients_that_are_not_contiguous_take_the_other_way(self, pair: list[SharedSums]) -> None:
        grads = [torch.randn(100, 90).t() for _ in pair]
        expected = (grads[0] + grads[1]) / 2

        def work(worker: SharedSums) -> bool:
            views = BucketViews([torch.Size([90, 100])], torch.float32, 2)
            views.grads = [grads[worker.rank]]
            return worker.all_reduce(views, 7, aggregate_into)

        assert together(pair, work) == [True, True]
        for grad in grads:
            torch.testing.assert_close(grad, expected, rtol=0, atol=0)

    def test_one_that_comes_late_and_one_that_sleeps(self, pair: list[SharedSums]) -> None:
        def work(worker: SharedSums) -> float:
            value = torch.ones(300_000)
            for number in range(6):
                if number % 2 == worker.rank:
                    threading.Event().wait(0.05)  # the other has gone to sleep by then
                assert worker.all_reduce(value, number, aggregate_into)
            return float(value.sum())

        assert together(pair, work) == [300_000.0 * 64] * 2

    def test_a_worker_of_several_makes_another_call(self, open_sums: Open) -> None:
        workers = self.compiled(open_sums, 3)

        def work(worker: SharedSums) -> tuple[bool, float, float]:
            value = torch.full((200_000,), 1.0 + worker.rank)
            same = worker.barrier.compare(9)[0] if worker.rank == 1 else worker.all_reduce(value, 8, not_called)
            before = float(value[0])
            assert worker.all_reduce(value, 5, not_called)
            return same, before, float(value[-1])

        assert together(workers, work) == [(False, 1.0, 6.0), (False, 2.0, 6.0), (False, 3.0, 6.0)]

    def test_one_of_several_leaves(self, open_sums: Open) -> None:
        workers = self.compiled(open_sums, 3)
        workers[2].barrier.leave()

        def work(worker: SharedSums) -> None:
            with pytest.raises(BarrierError, match="worker 2 of this host has left"):
                worker.all_reduce(torch.ones(200_000), 1, not_called)

        together(workers[:2], work)

    def test_different_calls_change_nothing_and_the_next_ones_are_right(self, pair: list[SharedSums]) -> None:
        def work(worker: SharedSums) -> tuple[bool, float, float]:
            value = torch.full((5000,), 1.0 + worker.rank)
            same = worker.all_reduce(value, worker.rank, aggregate_into)
            before = float(value[0])
            assert worker.all_reduce(value, 5, aggregate_into)
            return same, before, float(value[4999])

        assert together(pair, work) == [(False, 1.0, 3.0), (False, 2.0, 3.0)]

    def test_the_other_leaves(self, pair: list[SharedSums]) -> None:
        pair[1].barrier.leave()
        with pytest.raises(BarrierError, match="worker 1 of this host has left"):
            pair[0].all_reduce(torch.ones(5000), 1, aggregate_into)


@pytest.mark.distributed(workers=2, timeout=90)
def test_ranks_compile_the_pair_when_it_pays(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "COMPILING_SECONDS", 1e-9)
    monkeypatch.setattr(host_sums, "_warm_up", backends.WarmUp("cpu.cpu_exchange"))
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        for _ in range(2000):
            value = torch.full((30_000,), 1.0 + rank)
            group.all_reduce(value, "test")
            assert bool((value == 3).all())
            if all(group.numbers(int(bool(group._memory.sums._compiled._found)), "loaded")):  # type: ignore[attr-defined]
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
        monkeypatch.setattr(shared_sums, "mmap", Mapping)
    with pytest.raises(PeerLostError):
        td.MirroredStrategy()
    assert {path for path in Path("/dev/shm").iterdir() if path.name.startswith("tfstyle-")} <= before
