"""Fixtures of multi-process tests, and a check for what any test leaves behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tfstyle_dist.core.processes import lives
from tfstyle_dist.testing import messages, processes

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy
    from tfstyle_dist.testing.rank_session import RankSession
    from tfstyle_dist.testing.ranks import Ranks

_LEAK_PATIENCE = 3.0
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_PREFIX = "tfstyle"


def _find_session(request: pytest.FixtureRequest) -> RankSession | None:
    session: RankSession | None = request.config.pluginmanager.get_plugin(messages.RANK_PLUGIN_NAME)
    return None if session is None or session.assignment is None else session


def _rank_session(request: pytest.FixtureRequest) -> RankSession:
    session = _find_session(request)
    if session is None:
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
    return assignment.world_size


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


@pytest.fixture
def attempt(request: pytest.FixtureRequest) -> int:
    """How often this rank was restarted during the test: 0 at first."""
    assignment = _rank_session(request).assignment
    assert assignment is not None
    return assignment.attempt


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The default group of `torch.distributed`, with the marker's backend and deadline.

    It is destroyed after the test.
    """
    assignment = _rank_session(request).assignment
    assert assignment is not None
    from datetime import timedelta

    import torch.distributed

    from tfstyle_dist.comm.rendezvous.bootstrap import before_default_group

    device = None
    if assignment.backend == "nccl":
        if torch.cuda.device_count() < assignment.world_size:
            pytest.skip(
                f"backend 'nccl' needs {assignment.world_size} CUDA devices, this machine has "
                f"{torch.cuda.device_count()}"
            )
        device = torch.device("cuda", assignment.rank)
        torch.cuda.set_device(device)
    before_default_group()
    torch.distributed.init_process_group(
        assignment.backend,
        init_method="file://" + os.environ["TFSTYLE_RENDEZVOUS_FILE"],
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=timedelta(seconds=float(os.environ["TFSTYLE_TIMEOUT_SECONDS"])),
        device_id=device,
    )
    yield torch.distributed.group.WORLD
    if torch.distributed.is_initialized():  # the test may have destroyed it
        torch.distributed.destroy_process_group()


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Iterator[Strategy]:
    """The strategy that `strategy_combinations` names, else a `MirroredStrategy` over the ranks of the test.

    The latter has as many local replicas as the marker says. It is closed after the test.
    """
    from tfstyle_dist.testing.strategies import NamedStrategy, mirrored

    named: NamedStrategy | None = getattr(request, "param", None)
    if named is not None:
        made = named.create()
    else:
        session = _find_session(request)
        made = mirrored(1 if session is None or session.assignment is None else session.assignment.replicas)
    yield made
    made.close()


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
        files = sorted(_SHARED_MEMORY / name for name in self.shared_memory - before.shared_memory)
        return leaks + [f"file {path}" for path in files if not _belongs_to_another_session(path)]


def _belongs_to_another_session(path: Path) -> bool:
    """Whether a process of another worker of pytest-xdist uses the file."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return False
    session = os.getppid() if messages.RANK_VARIABLE in os.environ else os.getpid()
    others = processes.users(path) - processes.tree(session)
    return any(lives(pid) for pid in others)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves threads, child processes, environment variables or shared memory files.

    What is on its way out gets a few seconds. Of the files in /dev/shm those that start with `tfstyle` count, unless
    another worker of pytest-xdist uses them.
    Request it for all tests of a folder with an autouse fixture in its conftest.py:

    Example:
        >>> @pytest.fixture(autouse=True)
        ... def _check_for_leaks(no_leaks):
        ...     pass
    """
    before = _World.now()
    yield
    if leaks := processes.left_after(_LEAK_PATIENCE, lambda: _World.now().leaks_since(before)):
        lines = ["the test left behind:", *(f"  {leak}" for leak in leaks)]
        lines.append("End, join or restore them before the test returns.")
        pytest.fail("\n".join(lines), pytrace=False)
