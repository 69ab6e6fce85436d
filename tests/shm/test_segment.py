"""Memory that workers share: what each of them sees, and what is left of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core import unix_sockets
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.shm import memory_file, pages, segment as segments
from tfstyle_dist.shm.pages import PAGE
from tfstyle_dist.shm.segment import Segment, check_one_host, open_segment


@pytest.fixture
def segment() -> Segment:
    """Four pages that hold ones."""
    handle = memory_file.create("test", 4 * PAGE)
    made = Segment(handle, 4 * PAGE)
    os.close(handle)
    made.shared.fill_(1)
    return made


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError


@pytest.fixture(params=["the kernel scans", "entries are read", "pages are compared"])
def knowledge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the pages that a process has copied are found: old kernels cannot scan, some containers tell nothing."""
    if request.param != "the kernel scans":
        monkeypatch.setattr(pages.fcntl, "ioctl", refuse)
    if request.param == "pages are compared":
        monkeypatch.setattr(pages.os, "pread", refuse)
    monkeypatch.setattr(segments, "_COMPARED_BYTES", PAGE)


@pytest.mark.usefixtures("knowledge")
def test_a_shared_write_is_seen_until_the_worker_writes_the_page_itself(segment: Segment) -> None:
    assert segment.private.sum() == 4 * PAGE
    assert segment.written() == []
    segment.private[PAGE + 5] = 9
    assert segment.written() == [(PAGE, 2 * PAGE)]
    assert segment.shared[PAGE + 5] == 1
    segment.shared.fill_(2)
    assert segment.private[PAGE : 2 * PAGE].unique().tolist() == [1, 9]
    assert segment.private[:PAGE].unique().tolist() == [2]
    segment.forget(PAGE + 5, PAGE + 6)
    assert segment.private.unique().tolist() == [2]
    assert segment.written() == []


@pytest.mark.usefixtures("knowledge")
def test_neighbouring_pages_are_one_range(segment: Segment) -> None:
    segment.private[2 * PAGE - 1 : 2 * PAGE + 1] = 3
    segment.private[0] = 3
    assert segment.written() == [(0, 3 * PAGE)]
    segment.forget(PAGE, 2 * PAGE)
    assert segment.written() == [(0, PAGE), (2 * PAGE, 3 * PAGE)]


@pytest.mark.usefixtures("knowledge")
def test_many_ranges_are_found_in_order() -> None:
    count = 300  # more than the kernel is asked for at once
    handle = memory_file.create("test", count * PAGE)
    segment = Segment(handle, count * PAGE)
    os.close(handle)
    for page in range(0, count, 2):
        segment.private[page * PAGE] = 1
    assert segment.written() == [(page * PAGE, (page + 1) * PAGE) for page in range(0, count, 2)]


def test_the_memory_stays_when_a_worker_lets_go_of_its_pages(segment: Segment) -> None:
    segment.unmap_shared()
    assert segment.shared.sum() == segment.private.sum() == 4 * PAGE


def test_workers_on_several_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="worker 0 on a, worker 1 on b"):
        check_one_host([["a", "1"], ["b", "2"]])


@pytest.mark.distributed(workers=2, timeout=60, deadline=15)
def test_a_segment_is_for_this_user_alone_and_leaves_nothing(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        before = set(Path("/dev/shm").iterdir())
        modes: list[int] = []
        fchmod = os.fchmod
        monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: (modes.append(mode), fchmod(descriptor, mode)))
        segment = open_segment(group, 100, "test")
        assert modes == ([0o600] if rank == 0 else [])
        assert segment.nbytes == PAGE
        segment.shared[rank] = 7
        group.numbers(0, "written")
        assert segment.private[:3].tolist() == [7, 7, 0]
        assert {p for p in Path("/dev/shm").iterdir() if p.name.startswith("tfstyle-")} <= before


@pytest.mark.distributed(workers=2, timeout=60, deadline=15)
def test_a_worker_that_cannot_map_the_memory_is_an_error_on_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with td.MirroredStrategy() as strategy:
        if rank == 1:
            monkeypatch.setattr(unix_sockets, "connect", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
        with pytest.raises(UnavailableError, match=r"worker 1 cannot map 4096 bytes .* \(one container\)"):
            open_segment(strategy.worker.group, 100, "test")
        monkeypatch.undo()
        torch.testing.assert_close(open_segment(strategy.worker.group, 1, "again").shared[0].item(), 0)
