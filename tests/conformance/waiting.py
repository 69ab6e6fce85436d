"""Recorded programs that cannot agree yet, each with the part of the package it waits for (see docs/status.md)."""

from __future__ import annotations

CATEGORIES = ("variables", "run", "reduce", "context", "xdev", "train", "data", "cluster", "partition", "ps")

WAITING = {
    "MultiWorkerMirroredStrategy": ("xdev.case_strategy_devices",),
}
