"""The messages between a pytest session and its rank processes.

They travel pickled over a private pipe between processes of the same user and the same code.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RANK_PLUGIN_NAME = "tfstyle_dist_rank"
RANK_VARIABLE = "TFSTYLE_TESTING_RANK"
# Makes a rank write its stacks. Tests set handlers of their own for SIGUSR1, as schedulers announce an end with it.
STACKS_SIGNAL: signal.Signals = getattr(signal, "SIGRTMAX", signal.SIGUSR1)


@dataclass(frozen=True)
class Start:
    """The first message to a rank: how to build its own pytest session.

    Attributes:
        options: The values of the parent's command line options.
        args: Plugins to load early and the parent's positional arguments; the latter decide which initial
            conftest files are loaded.
        pickled: The values that can be read only when the plugins and conftest files are loaded.
        worker: What pytest-xdist told the parent, if the parent is one of its workers.
    """

    options: Mapping[str, Any]
    args: tuple[str, ...]
    pickled: Mapping[str, bytes] = field(default_factory=dict)
    worker: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Collect:
    """Asks a rank to collect one test file, so that slow imports do not eat into the test's own time.

    Attributes:
        path: The file.
        nodeid: The test that is to be run.
        env: Variables to set, or with None to remove, while the file is imported.
    """

    path: str
    nodeid: str
    env: Mapping[str, str | None]


@dataclass(frozen=True)
class Run:
    """Asks a rank to run one test that it has collected.

    Attributes:
        nodeid: The test.
        rank: The rank that this process plays.
        env: Variables to set, or with None to remove, during the test.
        world_size: How many ranks there are.
        pids_path: A file with the process ids of all ranks, in the order of the ranks; a restart rewrites it.
        shared_dir: A directory of this test that is the same on all ranks.
        devices: How many CUDA devices the test needs.
        replicas: How many local replicas the fixture `strategy` has.
        backend: The backend of the fixture `process_group`.
        attempt: How often the rank was restarted during the test.
    """

    nodeid: str
    rank: int
    env: Mapping[str, str | None]
    world_size: int
    pids_path: str
    shared_dir: str
    devices: int | None = None
    replicas: int = 1
    backend: str = "gloo"
    attempt: int = 0


@dataclass(frozen=True)
class Reset:
    """Asks a rank to undo what the last test left behind."""


@dataclass(frozen=True)
class Exit:
    """Asks a rank to end its pytest session and leave."""


@dataclass(frozen=True)
class Ready:
    """A rank's answer to Start, Collect and Reset.

    Attributes:
        problem: Why the rank could not do what it was asked, or None.
    """

    problem: str | None = None


@dataclass(frozen=True)
class Finished:
    """A rank's answer to Run.

    Attributes:
        reports: The serialised pytest reports of setup, call and teardown.
        crash: A traceback, where the test ended the rank's pytest session, else None.
    """

    reports: list[dict[str, Any]] = field(default_factory=list)
    crash: str | None = None


@dataclass(frozen=True)
class ExpectDeath:
    """A rank says that the death of a rank belongs to the test."""

    rank: int


@dataclass(frozen=True)
class Restart:
    """A rank asks for a new process that runs the test as the named rank."""

    rank: int
