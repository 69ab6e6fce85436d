"""Processes with a pid namespace of their own, as in containers that share all else with their host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Put before a command: it is process 1 of its container."""


def beside(container: subprocess.Popen[str]) -> list[str]:
    """Put before a command: it runs in the container of a process that was started with ``CONTAINER``."""
    inner = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()[0]
    return ["nsenter", "--target", inner, "--pid", "--mount"]


def _possible() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


needs_containers = pytest.mark.skipif(not _possible(), reason="pid namespaces cannot be made here (root is needed)")
