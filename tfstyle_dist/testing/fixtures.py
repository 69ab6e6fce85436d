"""Fixtures of multi-process tests, and a check for what any test leaves behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tfstyle_dist.testing import messages, processes

if TYPE_CHECKING:
    from tfstyle_dist.testing.rank_session import RankSession
    from tfstyle_dist.testing.ranks import Ranks

_LEAK_PATIENCE = 3.0
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_PREFIX = "tfstyle"


def _rank_session(request: pytest.FixtureRequest) -> RankSession:
    session: RankSession | None = request.config.pluginmanager.get_plugin(messages.RANK_PLUGIN_NAME)
    if session is None or session.assignment is None:
        pytest.fail(
            f"the fixture '{request.fixturename}' was requested by a test that does not run on ranks; write "
            "@pytest.mark.distributed(workers=2) on the test",
            pytrace=False,
        )
    return session


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank that runs the test, counted from 0."""
    assignment = _rank_session(request).assignment
    assert assignment is not None
    return assignment.rank


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """How many ranks run the test."""
    assignment = _rank_session(request).assignment
    assert assignment is not None
    return len(assignment.pids)


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """An empty directory of this test that is the same on all its ranks; `tmp_path` is each rank's own."""
    assignment = _rank_session(request).assignment
    assert assignment is not None
    return Path(assignment.shared_dir)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """A handle that kills, stops and resumes the ranks of the test: `tfstyle_dist.testing.ranks.Ranks`."""
    return _rank_session(request).ranks


@dataclass(frozen=True)
class _World:
    """What a test may not change for good."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> _World:
        environment = dict(os.environ)
        # pytest itself changes it between the phases of a test.
        environment.pop("PYTEST_CURRENT_TEST", None)
        return cls(
            environment,
            frozenset(threading.enumerate()),
            frozenset(processes.children(os.getpid())),
            frozenset(path.name for path in _SHARED_MEMORY.glob(f"{_SHARED_MEMORY_PREFIX}*")),
        )

    def leaks_since(self, before: _World) -> list[str]:
        names = self.environment.keys() | before.environment.keys()
        leaks = [
            f"environment variable {name} (was {before.environment.get(name)!r}, is {value!r})"
            for name in sorted(names)
            if (value := self.environment.get(name)) != before.environment.get(name)
        ]
        leaks += sorted(f"thread {thread.name!r}" for thread in self.threads - before.threads)
        leaks += [f"child process {pid}" for pid in sorted(self.children - before.children)]
        files = sorted(self.shared_memory - before.shared_memory)
        return leaks + [f"file {_SHARED_MEMORY / name}" for name in files]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves threads, child processes, environment variables or shared memory files.

    What is on its way out gets a few seconds. Of the files in /dev/shm those that start with `tfstyle` count.
    Request it for all tests of a folder with an autouse fixture in its conftest.py:

    Example:
        >>> @pytest.fixture(autouse=True)
        ... def _check_for_leaks(no_leaks):
        ...     pass
    """
    before = _World.now()
    yield
    end = time.monotonic() + _LEAK_PATIENCE
    while (leaks := _World.now().leaks_since(before)) and time.monotonic() < end:
        time.sleep(0.02)
    if leaks:
        lines = ["the test left behind:", *(f"  {leak}" for leak in leaks)]
        lines.append("End, join or restore them before the test returns.")
        pytest.fail("\n".join(lines), pytrace=False)
