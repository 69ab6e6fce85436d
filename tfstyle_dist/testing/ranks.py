"""Fault injection: a running test's handle on the processes of its ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tfstyle_dist.testing import messages


class Ranks:
    """The processes of the running test's ranks; the fixture `ranks` is one.

    Args:
        pids_path: A JSON file with their process ids in the order of the ranks.
        send: Sends a message to the parent process.

    Example:
        >>> @pytest.mark.distributed(workers=3, may_die=(2,))
        ... def test_two_survive(rank, ranks):
        ...     if rank == 2:
        ...         ranks.kill(2)
    """

    def __init__(self, pids_path: str, send: Callable[[object], None]) -> None:
        self._pids_path = Path(pids_path)
        self._send = send

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in the order of the ranks."""
        # Read anew, because a restart changes them.
        return tuple(json.loads(self._pids_path.read_text()))

    def kill(self, rank: int) -> None:
        """Ends a rank with SIGKILL, as an out-of-memory killer or a lost machine would.

        Args:
            rank: The rank, which may be the caller's own; then this does not return.

        Raises:
            ValueError: If there is no such rank.
            ProcessLookupError: If the rank is already gone.
        """
        os.kill(self._pid(rank), signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """Freezes a rank with SIGSTOP, as a hang of the whole machine would.

        Args:
            rank: The rank; if it is the caller's own, this returns when another rank resumes it.

        Raises:
            ValueError: If there is no such rank.
            ProcessLookupError: If the rank is already gone.
        """
        os.kill(self._pid(rank), signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Lets a stopped rank go on.

        Args:
            rank: The rank.

        Raises:
            ValueError: If there is no such rank.
            ProcessLookupError: If the rank is already gone.
        """
        os.kill(self._pid(rank), signal.SIGCONT)

    def restart(self, rank: int) -> None:
        """Has a new process run the test body as a rank; the old one is killed if it still lives.

        This returns at once. The new process sets up its own fixtures; its `attempt` is one higher, and it is
        the one that must report.

        Args:
            rank: The rank. If it is the caller's own, the call may not return.

        Raises:
            ValueError: If there is no such rank.

        Example:
            >>> @pytest.mark.distributed(workers=2)
            ... def test_comes_back(rank, ranks, attempt):
            ...     if rank == 1 and attempt == 0:
            ...         ranks.restart(1)
            ...         time.sleep(30)
        """
        self._pid(rank)
        self._send(messages.Restart(rank))

    def expect_death(self, rank: int) -> None:
        """Says that a rank's death or silence belongs to the test, so that its missing report is no failure.

        Args:
            rank: The rank. If it reports after all, its report counts.

        Raises:
            ValueError: If there is no such rank.
        """
        self._pid(rank)
        self._send(messages.ExpectDeath(rank))

    def _pid(self, rank: int) -> int:
        pids = self.pids
        if not 0 <= rank < len(pids):
            raise ValueError(f"rank {rank} does not exist; this test has the ranks 0 to {len(pids) - 1}")
        return pids[rank]
