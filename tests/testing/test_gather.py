"""Messages of a process that was replaced by another in the meantime, and stacks that come late."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.testing import messages, rank_process
from tfstyle_dist.testing.gather import Gathered, gather
from tfstyle_dist.testing.rank_process import RankProcess


class Rank:
    """The end of a rank's pipe, without a process."""

    rank, hung_up, pid = 1, False, 0

    def __init__(self, *said: object) -> None:
        self.connection, theirs = Pipe()
        for message in said:
            theirs.send(message)
        self._theirs: Connection[Any, Any] = theirs
        self.received: Callable[[], list[object]] = lambda: RankProcess.received(self)  # type: ignore[arg-type]

    def exited(self) -> None:
        """It lives."""

    def request_stacks(self) -> None:
        """It shows none."""

    def wait_for_stacks(self) -> str:
        """It shows none."""
        return "none"


def gathered(*said: object) -> tuple[Gathered, int]:
    """What comes of a rank that says all this before anybody looks; and how often it was replaced."""
    made: list[Rank] = []

    def restart(rank: int) -> Any:
        assert rank == 1
        made.append(Rank(messages.Ready(), messages.Finished([], f"process {len(made) + 1}")))
        return made[-1]

    return gather([Rank(*said)], 20.0, (), restart), len(made)  # type: ignore[list-item]


@pytest.mark.parametrize("after", [[], [messages.Restart(1)], [messages.Finished([], "the old one")]])
def test_what_a_replaced_process_said_after_it_asked_does_not_count(after: list[object]) -> None:
    result, replaced = gathered(messages.Restart(1), *after)
    assert replaced == 1
    assert result.answers == {1: messages.Finished([], "process 1")}


def silent(folder: Path) -> Any:
    """What a session has of a rank process that was just asked for its stacks."""
    process: Any = object.__new__(RankProcess)
    process.directory, process.earlier_output, process._marks = folder, {}, {"stacks": 0}
    process._asked = time.monotonic()
    return process


def test_stacks_that_are_there_are_read_however_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = silent(tmp_path)
    (tmp_path / "stacks.txt").write_text("all stacks\n")
    now = [time.monotonic()]

    def monotonic() -> float:
        now[0] += 60.0
        return now[0]

    monkeypatch.setattr(rank_process.time, "monotonic", monotonic)
    monkeypatch.setattr(RankProcess, "exited", lambda self: None)
    assert process.wait_for_stacks() == "all stacks\n"


def test_stacks_are_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = silent(tmp_path)
    pieces = iter(["the first ", "", "", "the second"])  # a pause of 0.3 s is not the end

    def sleep(seconds: float, wait: Callable[[float], None] = time.sleep) -> None:
        wait(seconds)
        with (tmp_path / "stacks.txt").open("a") as stream:
            stream.write(next(pieces, ""))

    (tmp_path / "stacks.txt").touch()
    monkeypatch.setattr(rank_process.time, "sleep", sleep)
    monkeypatch.setattr(RankProcess, "exited", lambda self: None)
    assert process.wait_for_stacks() == "the first the second"
