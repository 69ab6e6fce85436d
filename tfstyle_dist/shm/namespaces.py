"""Which processes can share memory: those of one boot of one host, in one pid namespace where they use ``/proc``."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tfstyle_dist.core import env


def boot_id() -> str:
    """Identifies this boot of this host; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_and_boot() -> tuple[str, str]:
    """The name of this host, and the boot id, which tells hosts of equal names apart."""
    return socket.gethostname(), boot_id()


def pid_namespace() -> str:
    """Tells whether two processes of one boot mean the same process by a number, in ``/proc`` too: if this is equal.

    Containers have pid namespaces of their own as a rule, so each has a process 1.

    Returns:
        Empty where the system does not tell, or ``/proc`` is that of another namespace.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return os.readlink("/proc/self/ns/pid") if os.path.lexists("/proc/self/ns/pid") else "the only one"
    except OSError:
        return ""


def sharing_id() -> str:
    """Tells whether two processes can find each other's memory by process id: if this is equal, and not empty.

    Returns:
        Equal for processes of one boot, one pid namespace and one IPC namespace; empty where nothing tells it.
    """
    try:
        boot, pids = boot_id(), pid_namespace()
        return f"{boot} {pids} {os.stat('/dev/shm').st_dev} {env.host_name() or ''}" if boot and pids else ""
    except OSError:
        return ""
