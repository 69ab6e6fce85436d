"""Recorded programs that cannot agree yet, each with the part of the package it waits for (see docs/status.md)."""

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
