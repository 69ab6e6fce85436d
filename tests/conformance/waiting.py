"""Recorded programs that cannot agree yet, and results that differ on purpose (see docs/status.md)."""

from __future__ import annotations

CATEGORIES = (
    "variables",
    "run",
    "reduce",
    "context",
    "xdev",
    "train",
    "data",
    "cluster",
    "multiworker",
    "preempt",
    "misc",
    "partition",
    "ps",
)

WAITING: dict[str, tuple[str, ...]] = {}
"""By the part of the package that they wait for."""

DEVIATIONS: dict[str, str] = {}
"""Results in which the package does more than TensorFlow, and why; each must differ. Those that anybody who compares
would accept are in ``compare.py`` instead."""
