"""Merging the reports of a test's ranks into the one report of the test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tfstyle_dist.testing.pool import RankResult

_XPASS_STRICT = "[XPASS(strict)]"
_NEVER = float("inf")
_LATE = re.compile(r"wait timeout|timed out waiting|limit of a wait", re.IGNORECASE)  # torch's stores, Gloo, ours
_ABOUT_DEADLINES = (
    "A rank waited in vain for another one. How long ranks wait is deadline= of @pytest.mark.distributed, and the ini "
    "option distributed_deadline where the marker says nothing; a busy machine may need more."
)


class DistributedFailure(Exception):
    """A rank died, hung or could not begin; the report of the test says which and where."""


@dataclass(frozen=True)
class RankFailure:
    """One rank's part in a failure.

    Attributes:
        rank: The rank.
        header: One line that says what happened.
        detail: The rank's own `longrepr`, or a text.
        at: When it happened, in seconds since the epoch.
    """

    rank: int
    header: str
    detail: Any
    at: float


@dataclass(frozen=True)
class _Crash:
    """The part of pytest's file location that its one-line summary and other plugins' reports read."""

    path: str
    lineno: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


class RankFailures:
    """The `longrepr` of a test that failed on some of its ranks.

    Args:
        failures: The failures, in the order in which they are to be shown.
        notes: Lines about the other ranks.
        place: The file and the line of the test, for a failure that has no place of its own.
    """

    def __init__(self, failures: Sequence[RankFailure], notes: Sequence[str], place: tuple[str, int]) -> None:
        self._failures = failures
        self._notes = notes
        first = failures[0]
        crash = getattr(first.detail, "reprcrash", None)
        if crash is None:
            self.reprcrash = _Crash(*place, first.header)
        else:
            self.reprcrash = _Crash(crash.path, crash.lineno, f"rank {first.rank}: {crash.message}")

    def toterminal(self, tw: Any) -> None:
        """Writes the failures as pytest writes a traceback."""
        for failure in self._failures:
            tw.sep("=", failure.header, red=True, bold=True)
            if hasattr(failure.detail, "toterminal"):
                failure.detail.toterminal(tw)
            else:
                for line in str(failure.detail).splitlines():
                    tw.line(line)
        for note in self._notes:
            tw.line(note)

    def __str__(self) -> str:
        parts = [f"==== {failure.header} ====\n{failure.detail}" for failure in self._failures]
        return "\n".join([*parts, *self._notes])


@dataclass
class Merged:
    """The outcome of a test on all its ranks.

    Attributes:
        outcome: `passed`, `failed` or `skipped`, as in a pytest report.
        longrepr: What the report shows, in the form that pytest wants for the outcome.
        wasxfail: The reason of an expected failure or an unexpected pass, or None.
        sections: The captured output of every rank.
        broken: Whether the ranks, not the test body, failed.
        xpassed: Whether the test failed because it passed, against its strict mark.
        user_properties: What the ranks recorded with pytest's fixture `record_property`.
    """

    outcome: str = "passed"
    longrepr: Any = None
    wasxfail: str | None = None
    sections: list[tuple[str, str]] = field(default_factory=list)
    broken: bool = False
    xpassed: bool = False
    user_properties: list[tuple[str, object]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why the test was skipped."""
        return _reason(self.longrepr)


def merge(item: pytest.Item, results: Sequence[RankResult], timeout: float) -> Merged:
    """Merges what the ranks of one test reported.

    A failure of any rank is a failure of the test. Else a skip of any rank is a skip. A test that is expected
    to fail has done so if any of its ranks has.

    Args:
        item: The test in the session that will show the report.
        results: One result per rank.
        timeout: Seconds that the test had.

    Returns:
        The merged outcome.
    """
    verdicts = [_verdict(item.config, result, len(results), timeout) for result in results]
    merged = _decide(verdicts, (str(item.path), (item.location[1] or 0) + 1))
    for result, verdict in zip(results, verdicts, strict=True):
        merged.sections += _sections(result, verdict.reports)
        # Each report repeats the properties of the phases before it.
        recorded = [(name, value) for report in verdict.reports[-1:] for name, value in report.user_properties]
        merged.user_properties += [pair for pair in recorded if pair not in merged.user_properties]
    return merged


def _reason(longrepr: Any) -> str:
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)


@dataclass
class _Verdict:
    rank: int
    state: str
    reports: list[pytest.TestReport] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)
    deciding: pytest.TestReport | None = None
    broken: bool = False

    @property
    def reason(self) -> str:
        return _reason(None if self.deciding is None else self.deciding.longrepr)

    @property
    def summary(self) -> str:
        return f"skipped ({self.reason})" if self.state == "skipped" else self.state


def _verdict(config: pytest.Config, result: RankResult, workers: int, timeout: float) -> _Verdict:
    name = f"rank {result.rank} of {workers}"
    if result.finished is None:
        return _silent(result, name, timeout)
    load = config.hook.pytest_report_from_serializable
    reports = [load(config=config, data=data) for data in result.finished.reports]
    failed = [report for report in reports if report.failed]
    verdict = _Verdict(result.rank, "passed", reports)
    for report in failed:
        at = getattr(report, "stop", _NEVER)
        header = f"{name} failed" + ("" if report.when == "call" else f" at {report.when}")
        verdict.failures.append(RankFailure(result.rank, header, report.longrepr, at))
    if result.finished.crash is not None:
        header = f"{name}: the test ended the rank's pytest session"
        verdict.failures.append(RankFailure(result.rank, header, result.finished.crash, _NEVER))
    if verdict.failures:
        strict = len(verdict.failures) == 1 and str(verdict.failures[0].detail).startswith(_XPASS_STRICT)
        verdict.state = "xpassed strictly" if strict else "failed"
    else:
        _judge_unfailed(verdict, reports)
    return verdict


def _judge_unfailed(verdict: _Verdict, reports: Sequence[pytest.TestReport]) -> None:
    """What a test of which nothing failed was."""
    for report in reports:
        # Of a subtest only a failure, which was counted before, says something of the test.
        if hasattr(report, "context"):
            continue
        if hasattr(report, "wasxfail"):
            verdict.state, verdict.deciding = ("xfailed" if report.skipped else "xpassed"), report
        elif report.skipped:
            verdict.state, verdict.deciding = "skipped", report


def _silent(result: RankResult, name: str, timeout: float) -> _Verdict:
    if result.problem is not None:
        failure = RankFailure(result.rank, f"{name} could not collect the test", result.problem, 0.0)
    elif result.death_expected:
        return _Verdict(result.rank, "silent as expected")
    elif result.death is not None:
        header = f"{name} died with {result.death} before it reported"
        failure = RankFailure(result.rank, header, result.stderr[-2000:], 0.0)
    elif result.stacks is not None:
        header = f"{name} did not report in time (timeout={timeout:g} s); its stacks are"
        failure = RankFailure(result.rank, header, _without_harness(result.stacks), _NEVER)
    else:
        return _Verdict(result.rank, "not started")
    return _Verdict(result.rank, "failed", failures=[failure], broken=True)


def _without_harness(stacks: str) -> str:
    """Cuts each stack where pytest calls the test; the frames below are the same in every test."""
    kept, below = [], False
    for line in stacks.splitlines():
        below = line.startswith(" ") and (below or line.endswith(" in pytest_pyfunc_call"))
        if not below:
            kept.append(line)
    return "\n".join(kept)


def _decide(verdicts: Sequence[_Verdict], place: tuple[str, int]) -> Merged:
    by_state: dict[str, list[_Verdict]] = {}
    for verdict in verdicts:
        by_state.setdefault(verdict.state, []).append(verdict)
    if "failed" in by_state or "xfailed" not in by_state:
        failing = by_state.get("failed") or by_state.get("xpassed strictly")
        if failing:
            return _failed(failing, verdicts, place)
    for state, outcome in (("xfailed", "skipped"), ("skipped", "skipped"), ("xpassed", "passed")):
        if state in by_state:
            deciding = by_state[state][0].deciding
            assert deciding is not None, state
            longrepr = deciding.longrepr
            if state == "skipped" and isinstance(longrepr, tuple) and len(by_state[state]) < len(verdicts):
                longrepr = (longrepr[0], longrepr[1], f"{longrepr[2]} (rank {by_state[state][0].rank})")
            return Merged(outcome, longrepr, wasxfail=getattr(deciding, "wasxfail", None))
    if "passed" not in by_state:
        states = ", ".join(f"rank {verdict.rank} {verdict.state}" for verdict in verdicts)
        text = f"no rank reported: {states}"
        nobody = RankFailure(0, text, "At least one rank must live to say that the test passed.", 0.0)
        return Merged("failed", RankFailures([nobody], [], place), broken=True)
    return Merged()


def _failed(failing: Sequence[_Verdict], verdicts: Sequence[_Verdict], place: tuple[str, int]) -> Merged:
    failures = [failure for verdict in failing for failure in verdict.failures]
    failures.sort(key=lambda failure: failure.at)
    notes = [f"rank {verdict.rank}: {verdict.summary}" for verdict in verdicts if verdict not in failing]
    if any(_LATE.search(str(failure.detail)) for failure in failures):
        notes.append(_ABOUT_DEADLINES)
    return Merged(
        "failed",
        RankFailures(failures, notes, place),
        broken=any(verdict.broken for verdict in failing),
        xpassed=all(verdict.state == "xpassed strictly" for verdict in failing),
    )


def _sections(result: RankResult, reports: Sequence[pytest.TestReport]) -> list[tuple[str, str]]:
    sections = [
        (f"Captured {name} of rank {result.rank}", text)
        for name, text in (("stdout", result.stdout), ("stderr", result.stderr))
        if text
    ]
    if reports:
        # Each report repeats the sections of the phases before it.
        sections += [(f"{title} of rank {result.rank}", text) for title, text in reports[-1].sections if text]
    return sections
