"""Python of a system that is no Linux, as far as a program sees it: what macOS lacks is gone, /proc and /dev/shm too.

Python imports it at its start where this folder is on PYTHONPATH. torch and what it needs come first, for they were
built for the system that is there.
"""

import io
import os
import platform
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

if os.environ.get("TFSTYLE_PRETEND_SYSTEM"):
    import asyncio  # noqa: F401
    import multiprocessing  # noqa: F401
    import selectors
    import subprocess  # noqa: F401
    import tempfile  # noqa: F401

    import torch._dynamo
    import torch.distributed
    import torch.utils.data  # noqa: F401

    gone = {
        os: "sched_getaffinity sched_setaffinity memfd_create MFD_CLOEXEC eventfd eventfd_read eventfd_write "
        "EFD_CLOEXEC EFD_NONBLOCK posix_fallocate posix_fadvise pidfd_open pipe2 copy_file_range splice setns unshare "
        "getxattr setxattr listxattr removexattr fdatasync waitid getresuid setresuid getrandom timerfd_create",
        select: "epoll",
        selectors: "EpollSelector",
        signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGPOLL SIGSTKFLT",
        socket: "SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC TCP_USER_TIMEOUT TCP_KEEPIDLE SO_PEERCRED AF_NETLINK",
    }
    for module, names in gone.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc, assignment]
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"  # type: ignore[assignment]
    platform.machine = lambda: "arm64"  # type: ignore[assignment]

    def _without_files_of_linux(function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any = ".", *args: Any, **keywords: Any) -> Any:
            if not isinstance(path, int) and str(path).startswith(("/proc", "/dev/shm", "/sys")):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *args, **keywords)

        return asked

    for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
        setattr(os, name, _without_files_of_linux(getattr(os, name)))
    io.open = __builtins__["open"] = _without_files_of_linux(open)  # type: ignore[index]

    class _Socket(socket.socket):
        """One without the abstract namespace."""

        def bind(self, address: Any) -> None:
            if isinstance(address, str) and address.startswith("\0"):
                raise OSError(22, "Invalid argument")
            super().bind(address)

    socket.socket = _Socket  # type: ignore[misc]
