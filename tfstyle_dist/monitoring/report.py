"""What ``strategy.report()`` gives: a table of the phases, the reasons, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tfstyle_dist.monitoring import figure
from tfstyle_dist.monitoring.diagnosis import Finding, diagnose, in_turns
from tfstyle_dist.runtime.clocks import COMPUTE, PHASES, UPDATE

_SAID = {
    "input": "input (waiting for a batch)",
    "compute": "compute (forward, backward)",
    "communication": "communication, exposed",
    "wait": "waiting for other replicas",
    "update": "update (optimizer)",
    "other": "other (outside of run)",
}


@dataclass(frozen=True)
class ReplicaTimes:
    """Means over the steps of one replica.

    Attributes:
        replica: its number among all replicas.
        worker: number of its worker process.
        device: its device.
        seconds: of each of ``clocks.PHASES`` in a step.
        overlapped: seconds of a step in which a transfer was under way while the replica did something else.
    """

    replica: int
    worker: int
    device: str
    seconds: Sequence[float]
    overlapped: float


@dataclass(frozen=True)
class ElasticCounts:
    """What became of the steps of an elastic job, as one worker saw it.

    Attributes:
        committed: calls of ``run`` that this worker has finished.
        retried: how many it has begun again because a worker was lost or came.
        members: the workers that hold replicas now.
        replicas: those that this worker holds.
        memberships: the number of committed steps before each membership that it was in, and its workers.
        differences: step, worker and tensor of each copy that differed (``Elastic(check_every=)``).
    """

    committed: int
    retried: int
    members: tuple[int, ...]
    replicas: tuple[int, ...]
    memberships: tuple[tuple[int, tuple[int, ...]], ...]
    differences: tuple[tuple[int, int, str], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"An elastic job: {self.committed} steps committed here, {self.retried} begun again; workers "
            f"{list(self.members)} hold the replicas, this one {list(self.replicas)}."
        ]
        lines += [f"- from step {step} on: workers {list(members)}" for step, members in self.memberships]
        lines += [f"- step {step}: worker {worker} differed in {name}" for step, worker, name in self.differences]
        return "\n".join(lines)


@dataclass
class Report:
    """Where the time of a step goes, on all replicas; ``print`` it.

    Attributes:
        function: what ran, e.g. ``"train_step"``; empty when nothing did.
        steps: how many steps of it are measured, on the first worker.
        calls: how many there were.
        step_seconds: mean time of a step there.
        median_seconds: median of the recent ones.
        high_seconds: 95 of 100 recent steps are faster.
        first_seconds: the first step, which is not counted.
        replicas: the phases of each.
        others: name, number of steps and mean seconds of the other functions.
        recent: seconds and phases of the first local replica, for each recent step of this worker.
        elastic: of an elastic job, in which nothing else is counted.
    """

    function: str = ""
    steps: int = 0
    calls: int = 0
    step_seconds: float = 0.0
    median_seconds: float = 0.0
    high_seconds: float = 0.0
    first_seconds: float = 0.0
    replicas: tuple[ReplicaTimes, ...] = ()
    others: tuple[tuple[str, int, float], ...] = ()
    recent: tuple[tuple[float, tuple[float, ...]], ...] = field(default=(), repr=False)
    elastic: ElasticCounts | None = None

    @property
    def findings(self) -> list[Finding]:
        """Why a step takes longer than its computation, the largest share first."""
        return diagnose(self.replicas) if self.steps else []

    @property
    def busy_share(self) -> float:
        """Share of a step that computes and updates: no scaling is better than this."""
        if not self.step_seconds:
            return 0.0
        return fmean(r.seconds[COMPUTE] + r.seconds[UPDATE] for r in self.replicas) / self.step_seconds

    def mean(self, phase: str) -> float:
        """Mean seconds of a phase in a step, over the replicas.

        Args:
            phase: one of ``input``, ``compute``, ``communication``, ``wait``, ``update``, ``other``.
        """
        return fmean(r.seconds[PHASES.index(phase)] for r in self.replicas)

    def plot(self, path: str | Path) -> None:
        """Writes a picture: the phases of every replica, and the recent steps of this worker.

        Args:
            path: of the file; its ending says the form (.png, .svg, .pdf).

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: no step was counted.
        """
        if not self.steps:
            raise ValueError("There is nothing to draw: no step was counted. Call strategy.run first.")
        problem = figure.missing()
        if problem is not None:
            raise ModuleNotFoundError(f"report.plot: {problem}")
        figure.draw_phases(self, PHASES, Path(path))

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON, to be shown later by ``tfstyle-dist report PATH``.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            OSError: it cannot be written.

        Example:
            >>> strategy.report().save("report.json")
        """
        from tfstyle_dist.monitoring import saved

        saved.save(self, Path(path))

    def __str__(self) -> str:
        if self.elastic is not None:
            return str(self.elastic)
        if not self.steps:
            return (
                "No step was counted: strategy.run was not called twice since the last reset, or the monitor is off "
                "(strategy.monitor.enabled, TFSTYLE_MONITOR)."
            )
        lines = [
            f"Where the time of {self.function!r} goes: {self.steps} of {self.calls} steps on {len(self.replicas)} "
            f"replica(s), {_ms(self.step_seconds)} each (median {_ms(self.median_seconds)}, 95 % below "
            f"{_ms(self.high_seconds)}; the first one, {_ms(self.first_seconds)}, is not counted).",
            f"  {'':28} {'mean':>11}  share   {'least (replica)':>20} {'most (replica)':>20}",
        ]
        for phase, name in enumerate(PHASES):
            lines.append(self._line(_SAID[name], [r.seconds[phase] for r in self.replicas]))
        lines.append(self._line("together", [sum(r.seconds) for r in self.replicas]))
        lines.append(self._line("communication, overlapped", [r.overlapped for r in self.replicas]))
        lines.append(self._busy())
        lines += [f"- {finding.text}" for finding in self.findings] or ["- Nothing stands out."]
        lines += [f"Also: {name!r}, {count} steps of {_ms(seconds)}." for name, count, seconds in self.others]
        return "\n".join(lines)

    def _busy(self) -> str:
        turns = in_turns(self.replicas)
        if turns > 1:
            return (
                f"{self.busy_share * turns:.0%} of a step is compute and update of {turns} replicas of a process; "
                "they take turns, and the others wait. For speed start a process for each replica (torchrun)."
            )
        return f"{self.busy_share:.0%} of a step is compute and update; more is not to be had from scaling."

    def _line(self, name: str, values: Sequence[float]) -> str:
        mean, ids = fmean(values), [r.replica for r in self.replicas]
        line = f"  {name:28} {_ms(mean):>11}  {mean / self.step_seconds:5.0%}"
        if len(values) == 1:
            return line
        ends = [f"{_ms(v)} ({ids[values.index(v)]})" for v in (min(values), max(values))]
        return f"{line}   {ends[0]:>20} {ends[1]:>20}"


def assembled(summaries: Sequence[dict[str, Any]], function: str | None) -> Report:
    """The report of all workers.

    Args:
        summaries: what ``Monitor.summary`` gave on each worker, by rank.
        function: which; ``None``: the one that took the most time on the first worker.

    Raises:
        ValueError: a function of which no step is counted.
    """
    known = {name: f for name, f in summaries[0]["functions"].items() if f["count"]}
    if function is not None and function not in known:
        raise ValueError(f"No step of {function!r} was counted; there are {sorted(known) or 'none at all'}.")
    if not known:
        return Report()
    name = function or max(known, key=lambda n: known[n]["seconds"] / known[n]["count"] * known[n]["calls"])
    replicas = []
    for summary in summaries:
        times = summary["functions"].get(name)
        if times is None or not times["count"]:
            continue
        for place, replica in enumerate(summary["replicas"]):
            seconds = tuple(s / times["count"] for s in times["phases"][place])
            overlapped = times["overlapped"][place] / times["count"]
            replicas.append(ReplicaTimes(replica, summary["rank"], summary["devices"][place], seconds, overlapped))
    main = known[name]
    return Report(
        function=name,
        steps=main["count"],
        calls=main["calls"],
        step_seconds=main["seconds"] / main["count"],
        median_seconds=main["median"],
        high_seconds=main["high"],
        first_seconds=main["first"],
        replicas=tuple(replicas),
        others=tuple((n, f["calls"], f["seconds"] / f["count"]) for n, f in known.items() if n != name),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"
