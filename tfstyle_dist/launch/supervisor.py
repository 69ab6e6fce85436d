"""Runs tasks to the end: all succeed, or the first failure stops all; lost workers of elastic jobs start again."""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tfstyle_dist.core.processes import signal_name
from tfstyle_dist.launch.restarts import Restarts
from tfstyle_dist.launch.task import Task, UnwrittenError, show

_LOOK_SECONDS = 0.1
# The others often fail by themselves, with a message worth reading, before they are stopped.
_SETTLE_SECONDS = 4.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Starts tasks, shows their output, and ends with all of them gone.

    Args:
        tasks: the tasks.
        grace: seconds from SIGTERM to SIGKILL.
        evaluator_grace: seconds that an evaluator may go on after the training.
        restarts: of an elastic job, which goes on when a task that trains fails, as long as another one is left, and
            starts it again; ``None``: the first failure stops all.
    """

    def __init__(
        self, tasks: Sequence[Task], grace: float, evaluator_grace: float, restarts: Restarts | None = None
    ) -> None:
        self._restarts, self._lost = restarts, set[Task]()
        self._tasks, self._grace, self._evaluator_grace = list(tasks), grace, evaluator_grace
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._unwritten: OSError | None = None  # why the output does not come out any more

    def run(self) -> int:
        """Runs all tasks.

        Returns:
            0 (of an elastic job: if one of the workers came to the end), or the exit code of the first task that
            failed, or 128 plus the signal that ended the launcher, SIGPIPE where nobody reads its output any more;
            1 where its output cannot be written.
        """
        # ``nohup`` says that the end of the terminal is none of the job.
        numbers = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            for task in self._tasks:
                self._start(task)
            return self._watch()
        finally:
            self._kill()
            for task in self._tasks:
                task.drain()
            self._selector.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, task: Task) -> None:
        task.start()
        for stream in task.streams():
            self._selector.register(stream, selectors.EVENT_READ, task)

    def _start_again(self, task: Task) -> None:
        """A lost worker: what it has left behind is ended first."""
        for stream in task.streams():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stream)
        task.send(signal.SIGKILL)
        task.drain()
        self._lost.discard(task)
        self._start(task)

    def _start_due(self, restarts: Restarts, codes: dict[Task, int | None]) -> None:
        """Starts lost workers whose time has come; neither they nor those that still wait have ended, in ``codes``."""
        if any(task.trains and code == 0 for task, code in codes.items()):
            restarts.end()
        for task in restarts.due():
            self._start_again(task)
            codes[task] = None
        codes.update(dict.fromkeys(task for task in self._tasks if restarts.waits(task)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _watch(self) -> int:
        training_over: float | None = None
        while True:
            self._forward(_LOOK_SECONDS)
            if self._signals or self._unwritten is not None:
                return self._interrupted()
            codes = {task: task.code() for task in self._tasks}
            if any(codes.values()) and not self._goes_on(codes):
                return self._failed()
            if self._restarts is not None:
                self._start_due(self._restarts, codes)
            running = [task for task, code in codes.items() if code is None]
            if not running:
                return 0
            if self._training_is_over(running):
                training_over = training_over or time.monotonic()
                evaluators = [task for task in running if task.job == "evaluator"]
                if not evaluators or time.monotonic() - training_over > self._evaluator_grace:
                    if evaluators:
                        self._say(f"the training is over and {evaluators[0].name} goes on: stopping it")
                    self._stop(running, signal.SIGTERM)
                    return 0

    def _goes_on(self, codes: dict[Task, int | None]) -> bool:
        """Whether those that failed are lost workers of an elastic job that has others left, or has ended well."""
        failed = {task for task, code in codes.items() if code}
        if self._restarts is None or any(not task.trains for task in failed):
            return False
        over = any(task.trains and code == 0 for task, code in codes.items())
        for task in failed - self._lost:
            pause = None if over else self._restarts.plan(task)
            then = f"it is started again in {pause:g} s" if pause is not None else "the others go on without it"
            self._say(f"{task.name} (pid {task.pid}) ended with {codes[task]}; {then}")
        self._lost |= failed
        return any(task.trains and (not code or self._restarts.waits(task)) for task, code in codes.items())

    def _training_is_over(self, running: Sequence[Task]) -> bool:
        """The chief's end ends a cluster with parameter servers, whose workers only serve; else all must end."""
        jobs = {task.job for task in self._tasks}
        if {"chief", "ps"} <= jobs:
            return all(task.job != "chief" for task in running)
        return not any(task.trains for task in running)

    def _failed(self) -> int:
        """Gives the others time to fail, stops them, and shows the first failure."""
        end = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < end and any(task.code() is None for task in self._tasks):
            self._forward(_LOOK_SECONDS)
            if self._signals:
                break
        failed = [task for task in self._tasks if task.code()]
        self._stop([task for task in self._tasks if task.code() is None], signal.SIGTERM)
        self._forward(0)
        failed.sort(key=lambda task: (task.blames_others(), task.ended_at))
        first, code = failed[0], failed[0].code() or 1
        how = f"was ended by signal {code - 128} ({signal_name(code - 128)})" if code > 128 else f"exited with {code}"
        self._say(f"{first.name} (pid {first.pid}) failed first: it {how}; all tasks were stopped.")
        if trace := first.traceback():
            _show_error(f"[{first.name}] " + trace.replace("\n", f"\n[{first.name}] "))
        return code

    def _interrupted(self) -> int:
        number = self._signals[0] if self._signals else signal.SIGTERM
        if self._signals:
            why, code = signal_name(number), 128 + number
        elif isinstance(self._unwritten, BrokenPipeError):
            why, code = "nobody reads the output any more (it went into a pipe)", 128 + signal.SIGPIPE
        else:
            why, code = f"the output cannot be written ({self._unwritten})", 1
        self._say(f"{why}: stopping all tasks")
        self._signals.clear()
        running = [task for task in self._tasks if task.code() is None]
        self._stop(running, signal.Signals(number))
        return code

    def _stop(self, tasks: Sequence[Task], number: signal.Signals) -> None:
        """Sends a signal, and kills what does not go; a second Ctrl-C kills at once."""
        for task in tasks:
            task.send(number)
            task.send(signal.SIGCONT)
        end = time.monotonic() + self._grace
        while time.monotonic() < end and not self._signals and any(task.code() is None for task in tasks):
            self._forward(_LOOK_SECONDS)
        stubborn = [task.name for task in tasks if task.code() is None]
        if stubborn:
            self._say(f"{', '.join(stubborn)} did not stop: killed")
        self._kill()

    def _kill(self) -> None:
        """Kills all process groups, those of tasks that have ended too: they may have left children."""
        for task in self._tasks:
            task.send(signal.SIGKILL)
        for task in self._tasks:
            while task.started and task.code() is None:
                time.sleep(0.01)

    def _forward(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            stream: Any = key.fileobj
            try:
                more = key.data.forward(stream)
            except UnwrittenError as error:
                more, self._unwritten = True, error.reason
            if not more:
                self._selector.unregister(stream)

    def _say(self, text: str) -> None:
        _show_error(f"[launch] {text}")


def _show_error(text: str) -> None:
    with contextlib.suppress(UnwrittenError):
        show(text, sys.stderr)
