"""TensorBoard scalars of the phases. Needs tensorboard (extra ``tensorboard``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfstyle_dist.runtime.clocks import PHASES

if TYPE_CHECKING:
    from tfstyle_dist.monitoring.monitor import Monitor
    from tfstyle_dist.monitoring.steps import StepTimes


class ScalarLog:
    """Writes one point for every so many measured steps: ``step_time/<function>/<phase>`` in milliseconds.

    The phases are means over the local replicas; ``total`` is the whole step, ``overlapped`` the communication behind
    computation. The x axis counts the function's steps.

    Args:
        monitor: whose steps.
        directory: where the event file goes.
        every: steps to a point.
        writes: whether this worker writes; the others do nothing.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
        ValueError: ``every`` is not positive.
    """

    def __init__(self, monitor: Monitor, directory: str | Path, every: int, writes: bool) -> None:
        if every < 1:
            raise ValueError(f"every must be a positive number of steps, got {every}.")
        self._every = every
        self._sums: dict[str, list[float]] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._writer: Any = None
        if writes:
            self._writer = summary_writer("strategy.monitor.tensorboard")(str(directory))
        self._stop: Callable[[], None] = monitor.listen(self._add) if writes else _nothing

    def _add(self, step: StepTimes) -> None:
        sums = self._sums.setdefault(step.function, [0.0] * (len(PHASES) + 2))
        values = [sum(column) / len(step.phases) for column in zip(*step.phases, strict=True)]
        values += [sum(step.overlapped) / len(step.overlapped), step.seconds]
        for place, value in enumerate(values):
            sums[place] += value
        count = self._counts.get(step.function, (0, 0))[0] + 1
        self._counts[step.function] = count, step.number
        if count >= self._every:
            self._write(step.function)

    def _write(self, function: str) -> None:
        sums, (count, number) = self._sums.pop(function), self._counts.pop(function)
        for name, value in zip((*PHASES, "overlapped", "total"), sums, strict=True):
            self._writer.add_scalar(f"step_time/{function}/{name}", value / count * 1000, number)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._stop()
        if self._writer is not None:
            for function in list(self._sums):
                self._write(function)
            self._writer.close()
            self._writer = None

    def __enter__(self) -> ScalarLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def summary_writer(asked_by: str) -> Any:
    """The class ``torch.utils.tensorboard.SummaryWriter``.

    Args:
        asked_by: what needs it, for the message.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            f"{asked_by} writes with tensorboard, which is not installed: pip install tensorboard (the extra "
            "'tensorboard' of tfstyle_dist)."
        )
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def _nothing() -> None:
    """What the workers that do not write have to stop."""
