"""Recorded programs that cannot agree yet, each with the part of the package it waits for (see docs/status.md)."""

from __future__ import annotations

CATEGORIES = ("variables", "run", "reduce", "context", "xdev", "train", "data", "cluster", "preempt", "misc")

WAITING = {
    "MultiWorkerMirroredStrategy": ("xdev.case_strategy_devices",),
    "parameter server": ("misc.case_small_types_n2",),
}
