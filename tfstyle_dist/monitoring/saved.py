"""Reports as files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tfstyle_dist.core import json_text
from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.monitoring.report import ReplicaTimes, Report
from tfstyle_dist.runtime.clocks import PHASES

_FORMAT = "tfstyle_dist report"
_TIMES = len(PHASES)
_WHOLE, _TEXT, _SECONDS = "whole number", "text", "number of seconds"


def save(report: Report, path: Path) -> None:
    """Writes a report; ``load`` reads it."""
    path.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(report)}) + "\n", encoding="utf-8")


def load(path: Path) -> Report:
    """Reads what ``save`` wrote.

    Raises:
        DataLossError: it is something else.
    """
    try:
        found = json_text.parse(path.read_bytes())
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError("it has no report in it")
        kinds = {"function": _TEXT, "steps": _WHOLE, "calls": _WHOLE}
        plain = {f: _value(found.get(f), kinds.get(f, _SECONDS)) for f in _PLAIN}
        return Report(
            **plain,
            replicas=tuple(_replica(entry) for entry in _list(found.get("replicas"))),
            others=tuple(_row(entry, (_TEXT, _WHOLE, _SECONDS)) for entry in _list(found.get("others"))),
            recent=tuple((s, _times(phases)) for s, phases in map(_recent, _list(found.get("recent")))),
        )
    except ValueError as error:
        raise DataLossError(f"{path} is no saved report: {error}. Report.save(path) writes one.") from None


_PLAIN = ("function", "steps", "calls", "step_seconds", "median_seconds", "high_seconds", "first_seconds")


def _value(value: Any, kind: str) -> Any:
    if kind is _TEXT and isinstance(value, str):
        return value
    if kind is _WHOLE and type(value) is int and 0 <= value < 1 << 63:
        return value
    if kind is _SECONDS and type(value) in (int, float) and 0 <= value < 1e12:
        return float(value)
    raise ValueError(f"{str(value)[:80]!r} is no {kind}")


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{str(value)[:80]!r} is no list{'' if length is None else f' of {length}'}")
    return value


def _row(entry: Any, kinds: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(map(_value, _list(entry, len(kinds)), kinds))


def _times(phases: Any) -> tuple[float, ...]:
    return _row(phases, (_SECONDS,) * _TIMES)


def _recent(entry: Any) -> tuple[float, Any]:
    seconds, phases = _list(entry, 2)
    return _value(seconds, _SECONDS), phases


def _replica(entry: Any) -> ReplicaTimes:
    if not isinstance(entry, dict):
        raise ValueError(f"{str(entry)[:80]!r} is no replica")
    return ReplicaTimes(
        _value(entry.get("replica"), _WHOLE),
        _value(entry.get("worker"), _WHOLE),
        _value(entry.get("device"), _TEXT),
        _times(entry.get("seconds")),
        _value(entry.get("overlapped"), _SECONDS),
    )
