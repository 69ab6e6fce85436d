"""Waiting for one answer of every rank, with deaths, stops and a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from tfstyle_dist.testing import messages, processes
from tfstyle_dist.testing.rank_process import RankProcess

# A closed pipe shows a death at once, unless a forked child still holds the rank's end of it.
_DEATH_POLL = 0.1
# What peers of a rank that died unexpectedly get to say why they cannot go on.
_DEATH_GRACE = 6.0
# What a rank that may die, but lives, gets to report once all others have.
_SURVIVOR_GRACE = 3.0


@dataclass
class Gathered:
    """What came of one question to all ranks.

    Attributes:
        answers: The answer of each rank that gave one.
        deaths: How the other ranks ended, for those that did.
        expected: The ranks whose silence belongs to the test.
        stacks: The stacks of each rank that was silent to the end.
    """

    answers: dict[int, messages.Ready | messages.Finished] = field(default_factory=dict)
    deaths: dict[int, str] = field(default_factory=dict)
    expected: set[int] = field(default_factory=set)
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def all_answered(self) -> bool:
        """Whether every rank is alive and waits for the next message."""
        return not self.deaths and not self.stacks


def gather(
    ranks: Sequence[RankProcess],
    timeout: float,
    may_die: Iterable[int] = (),
    restart: Callable[[int], RankProcess] | None = None,
) -> Gathered:
    """Waits until every rank has answered, has died or has been given up.

    Args:
        ranks: The processes, each of which has been sent one message.
        timeout: Seconds after which the silent ranks' stacks are read.
        may_die: Ranks that need not answer.
        restart: Replaces the process of a rank by one that has been told what to run.

    Returns:
        The answers and what is known of the ranks that gave none.
    """
    gathering = _Gathering(ranks, time.monotonic() + timeout, Gathered(expected=set(may_die)), restart)
    while gathering.silent and not gathering.over():
        gathering.step()
    return gathering.finish()


class _Gathering:
    def __init__(
        self,
        ranks: Sequence[RankProcess],
        end: float,
        result: Gathered,
        restart: Callable[[int], RankProcess] | None,
    ) -> None:
        self.silent: dict[int, RankProcess] = {process.rank: process for process in ranks}
        self._end = end
        self._result = result
        self._restart = restart
        self._restarted: set[int] = set()
        self._death_times: dict[int, float] = {}
        self._only_expected_since: float | None = None

    def over(self) -> bool:
        """Whether nothing more is to be waited for."""
        # Asked anew each time, because a rank may say only after the death that it was meant.
        unexpected = [at for rank, at in self._death_times.items() if rank not in self._result.expected]
        end = min([self._end, *(at + _DEATH_GRACE for at in unexpected)])
        return time.monotonic() >= end

    def step(self) -> None:
        """Waits for news for a short while."""
        remaining = min(_DEATH_POLL, max(0.0, self._end - time.monotonic()))
        connections = [process.connection for process in self.silent.values() if not process.hung_up]
        if connections:
            wait(connections, timeout=remaining)
        else:
            time.sleep(remaining)
        ended = {rank: how for rank, process in self.silent.items() if (how := process.exited())}
        # Only now: what a rank wrote before it died must not be overlooked.
        for rank, process in list(self.silent.items()):
            if self.silent.get(rank) is process:
                self._take(rank, process.received())
        for rank, how in ended.items():
            still = self.silent.get(rank)
            if still is not None and still.exited() is not None:  # another process after a restart
                self._lost(rank, how)
        if self.silent and self.silent.keys() <= self._result.expected:
            self._end_expected()

    def _take(self, rank: int, received: list[object]) -> None:
        for message in received:
            if isinstance(message, messages.ExpectDeath):
                self._result.expected.add(message.rank)
            elif isinstance(message, messages.Restart):
                self._replace(message.rank)
                if message.rank == rank:
                    return  # what the process said after it has no meaning for the one in its place
            elif isinstance(message, messages.Ready) and rank in self._restarted and message.problem is None:
                continue  # it starts and collects before it runs
            else:
                assert isinstance(message, (messages.Ready, messages.Finished)), message
                self._result.answers[rank] = message
                self.silent.pop(rank, None)

    def _replace(self, rank: int) -> None:
        assert self._restart is not None, "only a running test restarts ranks"
        self.silent[rank] = self._restart(rank)
        self._restarted.add(rank)
        self._result.expected.discard(rank)
        self._result.deaths.pop(rank, None)
        self._result.answers.pop(rank, None)
        self._death_times.pop(rank, None)

    def _lost(self, rank: int, how: str) -> None:
        del self.silent[rank]
        self._death_times[rank] = time.monotonic()
        self._result.deaths[rank] = how

    def _end_expected(self) -> None:
        now = time.monotonic()
        self._only_expected_since = self._only_expected_since or now
        late = now - self._only_expected_since >= _SURVIVOR_GRACE
        for rank, process in list(self.silent.items()):
            if late or processes.is_stopped(process.pid):
                process.kill()
                self._lost(rank, "the harness, when all other ranks had reported")

    def finish(self) -> Gathered:
        """Reads the stacks of the ranks that are still silent."""
        for process in self.silent.values():
            process.request_stacks()
        self._result.stacks = {rank: process.wait_for_stacks() for rank, process in self.silent.items()}
        return self._result


def problems(answers: Mapping[int, messages.Ready | messages.Finished]) -> dict[int, str]:
    """Returns what the ranks that answered Ready complain about."""
    return {
        rank: answer.problem
        for rank, answer in answers.items()
        if isinstance(answer, messages.Ready) and answer.problem is not None
    }
