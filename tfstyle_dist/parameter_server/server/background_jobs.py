"""Work on a server's table that takes long: in small steps between requests, its slow parts in a thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

Steps = Iterator[Callable[[], None]]
"""Runs on the server's thread up to each ``yield``; what it yields runs in another thread before it goes on."""


class Jobs:
    """The jobs of one server. All methods are called by the server's thread.

    Only one yielded piece of each job waits at a time, so a job that copies variables holds one copy.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._active: dict[int, tuple[Steps, Future[None] | None]] = {}
        self._outcomes: dict[int, BaseException | None] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._active)

    def start(self, steps: Steps) -> int:
        """Begins a job; its number."""
        number = next(self._numbers)
        self._active[number] = (steps, None)
        self._advance(number)
        return number

    def tick(self) -> None:
        """Advances every job that does not wait for its thread."""
        for number in list(self._active):
            self._advance(number)

    def is_active(self, number: int) -> bool:
        """Whether a job is under way."""
        return number in self._active

    def outcome(self, number: int) -> tuple[bool, BaseException | None]:
        """Whether a job has ended, and its error; an outcome is told once."""
        return (True, self._outcomes.pop(number)) if number in self._outcomes else (False, None)

    def close(self) -> None:
        """Waits for the threads; jobs are not carried on."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for steps, _ in self._active.values():
            steps.close()  # type: ignore[attr-defined]
        self._active.clear()

    def _advance(self, number: int) -> None:
        steps, future = self._active[number]
        if future is not None and not future.done():
            return
        try:
            if future is not None:
                future.result()
            work = next(steps)
        except StopIteration:
            self._end(number, None)
            return
        except Exception as error:
            steps.close()  # type: ignore[attr-defined]
            self._end(number, error)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="tfstyle-ps-files")
        self._active[number] = (steps, self._pool.submit(work))

    def _end(self, number: int, error: BaseException | None) -> None:
        del self._active[number]
        self._outcomes[number] = error
        while len(self._outcomes) > 64:
            del self._outcomes[next(iter(self._outcomes))]
