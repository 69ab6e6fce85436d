"""When a lost worker of an elastic job is started again."""

from __future__ import annotations

import time

from tfstyle_dist.launch.task import Task

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0
_GOOD_SECONDS = 60.0  # a task that ran so long has not failed at once: the pause is the first one again


class Restarts:
    """Counts the restarts of each task, and waits longer before each of them.

    Args:
        most: restarts of each task.
        ended_file: made when a task has come to the end: one that is being started again has nobody to wait for.
    """

    def __init__(self, most: int, ended_file: str) -> None:
        self.most, self._ended_file = most, ended_file
        self._made: dict[Task, int] = {}
        self._pauses: dict[Task, float] = {}
        self._due: dict[Task, float] = {}

    def plan(self, task: Task) -> float | None:
        """A task has ended.

        Returns:
            The seconds until it is to be started again; ``None``: it was started again too often.
        """
        if self._made.get(task, 0) >= self.most:
            return None
        self._made[task] = self._made.get(task, 0) + 1
        pause = self._pauses.get(task, _FIRST_PAUSE)
        if task.seconds() > _GOOD_SECONDS:
            pause = _FIRST_PAUSE
        self._pauses[task] = min(2 * pause, _LONGEST_PAUSE)
        self._due[task] = time.monotonic() + pause
        return pause

    def end(self) -> None:
        """A task has come to the end: no other is started again, and those that wait to be let in are told."""
        self._due.clear()
        open(self._ended_file, "wb").close()

    def waits(self, task: Task) -> bool:
        """Whether a task that has ended is to be started again."""
        return task in self._due

    def due(self) -> list[Task]:
        """The tasks that are to be started now."""
        now = time.monotonic()
        tasks = [task for task, at in self._due.items() if at <= now]
        for task in tasks:
            del self._due[task]
        return tasks
