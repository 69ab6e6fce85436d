"""What the doctor found."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        area: what was looked at, e.g. ``"ports"``.
        level: how bad it is.
        text: what was found.
        advice: what to do about it; empty when it is fine.
    """

    area: str
    level: Level
    text: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        """For ``--json``."""
        return {**asdict(self), "level": self.level.value}

    def __str__(self) -> str:
        mark = {Level.OK: "ok     ", Level.WARNING: "WARNING", Level.PROBLEM: "PROBLEM"}[self.level]
        return f"{mark} {self.area}: {self.text}" + (f"\n        -> {self.advice}" if self.advice else "")


def ok(area: str, text: str) -> Finding:
    """All is well."""
    return Finding(area, Level.OK, text)


def warning(area: str, text: str, advice: str) -> Finding:
    """It may work."""
    return Finding(area, Level.WARNING, text, advice)


def problem(area: str, text: str, advice: str) -> Finding:
    """It will not work."""
    return Finding(area, Level.PROBLEM, text, advice)
