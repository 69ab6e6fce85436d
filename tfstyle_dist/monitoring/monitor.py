"""Counts where the time of each step goes, on this worker; ``report`` puts all workers together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core.tracing import region
from tfstyle_dist.monitoring import trace as traces
from tfstyle_dist.monitoring.report import Report, assembled
from tfstyle_dist.monitoring.steps import FunctionTimes, StepTimes
from tfstyle_dist.runtime.clocks import COMPUTE, OTHER, PHASES, STOPPED, WAIT, Clock
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.runtime.worker import Worker

if TYPE_CHECKING:
    from tfstyle_dist.monitoring.scalars import ScalarLog

_MOST_FUNCTIONS = 64
_ALL_OF_THE_FIRST = 64
_EVERY = 7
"""A prime, so that what a loop does every 10 or 16 steps is neither always nor never in a measured step."""


class Monitor:
    """Where the time of the steps of a strategy goes; ``strategy.monitor``.

    A step is a call of ``strategy.run``, or a block in ``step``, with what came before it since the last one: reading
    the batch, and the loop's own code. Steps are counted by the name of their function; its first call, which often
    compiles or allocates, is kept apart. A step that raises does not count. Of each function the first 64 steps are
    measured, then every seventh.

    Args:
        worker: replicas, whose clocks it starts, and group.
        enabled: whether it counts from the start.

    Attributes:
        running: name of the step under way; empty between steps.
        every: how many steps there are for each measured one after the first 64; 1 measures all.

    Example:
        >>> for batch in batches:
        ...     strategy.run(train_step, args=batch)
        >>> strategy.report()  # on every worker
    """

    def __init__(self, worker: Worker, enabled: bool) -> None:
        self._worker = worker
        self._functions: dict[str, FunctionTimes] = {}
        self._listeners: list[Callable[[StepTimes], None]] = []
        self.running = ""
        self.every = _EVERY
        self._outside: list[float] = []
        self._measures = False
        self._unmeasured = 0
        self._live = [Clock() for _ in worker.clocks]
        self._enabled = False
        self.enabled = enabled

    # ---- switches ---------------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether steps are counted; set it between two steps, in cross-replica context."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if self.running:
            raise RuntimeError("monitor.enabled was set inside a step; set it between two calls of strategy.run.")
        if value == self._enabled:
            return
        self._enabled = value
        self._measure(value)

    def _measure(self, value: bool) -> None:
        """Says whether the step that begins now is measured."""
        self._measures, self._unmeasured = value, 0
        for clock in self._live:
            clock.cut(OTHER)
        # In place: the executor and its runs hold this list.
        self._worker.clocks[:] = self._live if value else [STOPPED] * len(self._live)

    def reset(self) -> None:
        """Forgets all steps, e.g. those of a warm-up; the next call of a known function counts."""
        for times in self._functions.values():
            times.clear()
        if self._enabled and not self.running:
            self._measure(True)

    # ---- what users may mark ----------------------------------------------------------------------------------

    @contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """Counts a block as a step, where ``strategy.run`` is not used.

        Args:
            name: under which it is counted.

        Example:
            >>> with strategy.monitor.step("train"):
            ...     loss_of(batch).backward()
            ...     optimizer.step()
        """
        counts = self.begin(name)
        finished = False
        try:
            with region("step", name):
                yield
            finished = True
        finally:
            if counts:
                self.end(finished)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts a block as one phase, e.g. reading a batch that no distributed dataset gives.

        Args:
            name: ``"input"``, ``"compute"``, ``"communication"``, ``"wait"``, ``"update"`` or ``"other"``.

        Raises:
            ValueError: another name.

        Example:
            >>> with strategy.monitor.phase("input"):
            ...     batch = next(iterator)
        """
        if name not in PHASES:
            raise ValueError(f"There is no phase {name!r}; the phases are {', '.join(PHASES)}.")
        replica = current_replica()
        clock = self._worker.clocks[0 if replica is None else replica.local_replica_id]
        clock.enter(PHASES.index(name))
        try:
            with region(name):
                yield
        finally:
            clock.leave()

    # ---- what the strategy calls ------------------------------------------------------------------------------

    def begin(self, function: str) -> bool:
        """A step begins.

        Args:
            function: its name.

        Returns:
            Whether it counts: not inside another one.
        """
        if self.running or not self._enabled:
            return False
        self.running = function or "step"
        if not self._measures:
            return True
        first, *others = self._live
        self._outside = first.cut(WAIT if others else COMPUTE)
        for clock in others:
            clock.cut(WAIT)
        return True

    def end(self, finished: bool = True) -> None:
        """The step that ``begin`` began is over.

        Args:
            finished: whether it did not raise.
        """
        function, self.running = self.running, ""
        if not self._measures:
            times = self._times_of(function)
            times.calls += finished
            self._unmeasured += 1
            if self._unmeasured >= self.every - 1 or times.calls < _ALL_OF_THE_FIRST:
                self._measure(True)
            return
        inside = [clock.cut(OTHER) for clock in self._live]
        if not finished:
            return
        times = self._times_of(function)
        times.note(self._outside, inside)
        if times.calls > _ALL_OF_THE_FIRST and self.every > 1:
            self._measure(False)
        if self._listeners and (step := times.add_up()) is not None:
            step = replace(step, function=function)
            for listener in tuple(self._listeners):
                listener(step)

    def _times_of(self, function: str) -> FunctionTimes:
        times = self._functions.get(function)
        if times is None:
            if len(self._functions) >= _MOST_FUNCTIONS:  # a program that makes functions by the thousand
                function = "(other functions)"
            times = self._functions.setdefault(function, FunctionTimes(len(self._worker.clocks)))
        return times

    # ---- results ----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """This worker's numbers so far, as plain JSON data, seconds; no communication."""
        worker = self._worker
        functions = {name: times.summary() for name, times in self._functions.items()}
        count = worker.num_local_replicas
        return {
            "rank": worker.group.rank,
            "replicas": [worker.replica_id(r) for r in range(count)],
            "devices": [str(d) for d in worker.devices] or ["cpu:0"],
            "functions": functions,
        }

    def report(self, function: str | None = None) -> Report:
        """All workers' numbers; see ``Strategy.report``."""
        group = self._worker.group
        summaries = [self.summary()]
        if group.size > 1 and not group.traces:
            summaries = group.gather_objects(summaries[0], "monitor.report")
        report = assembled(summaries, function)
        mine = self._functions.get(report.function)
        report.recent = () if mine is None else mine.recent()
        return report

    # ---- other forms ------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[StepTimes], None]) -> Callable[[], None]:
        """Calls a function after each counted step of this worker.

        Args:
            listener: called with a ``StepTimes``; its own time counts as ``other`` of the next step.

        Returns:
            A function that ends this.
        """
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def tensorboard(self, directory: str | Path, every: int = 20) -> ScalarLog:
        """Writes the means of the phases as TensorBoard scalars, on the first worker alone.

        Args:
            directory: where the event file goes.
            every: so many steps of a function make one point.

        Returns:
            A context manager; ``close`` writes what is left and ends it.

        Raises:
            ModuleNotFoundError: tensorboard is not installed.
            ValueError: ``every`` is not positive.

        Example:
            >>> with strategy.monitor.tensorboard("runs/job1"):
            ...     for batch in batches:
            ...         strategy.run(train_step, args=batch)
        """
        from tfstyle_dist.monitoring.scalars import ScalarLog

        group = self._worker.group
        return ScalarLog(self, directory, every, writes=group.rank == 0 and group.leads)

    def trace(self, directory: str | Path) -> AbstractContextManager[Any]:
        """Records a trace of ``torch.profiler`` on this worker, all replicas, collectives by name.

        Args:
            directory: gets ``worker0.json``, ``worker1.json``, ..., for chrome://tracing or https://ui.perfetto.dev.

        Returns:
            A context manager that gives the ``torch.profiler.profile``. A trace of a few steps is large already.

        Example:
            >>> with strategy.monitor.trace("traces"):
            ...     for batch in itertools.islice(batches, 5):
            ...         strategy.run(train_step, args=batch)
        """
        return traces.record(Path(directory) / f"worker{self._worker.group.rank}.json")


def name_of(function: Callable[..., Any]) -> str:
    """Under which name the calls of a function are counted."""
    name = getattr(function, "__qualname__", None) or getattr(getattr(function, "func", None), "__qualname__", None)
    return (name or type(function).__name__).rpartition("<locals>.")[2]
