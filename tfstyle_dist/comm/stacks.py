"""A worker shows other workers of its host where its Python threads are, even while it does not take part.

A thread waits at a socket in Linux's abstract namespace, which leaves no file behind; only processes of the same user
get an answer. It costs nothing until somebody asks.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress

_MOST_FRAMES, _MOST_BYTES = 8, 20_000


def _place(pid: int) -> str:
    return f"\0tfstyle_dist.stacks.{pid}"


class _Server:
    """Answers until it is stopped."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(_place(os.getpid()))
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._answer, name="tfstyle_dist stacks", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                asker, _ = self._socket.accept()
            except OSError:
                return
            with asker, suppress(OSError):
                credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[1] == os.getuid():
                    asker.sendall(own_stacks().encode()[:_MOST_BYTES])

    def stop(self) -> None:
        """Ends the thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(1)
        self._socket.close()


_lock = threading.Lock()
_server: _Server | None = None
_users = 0


def start() -> None:
    """Begins to answer; each call needs one of ``stop``."""
    global _server, _users
    with _lock:
        _users += 1
        if _server is None and sys.platform == "linux":
            with suppress(OSError):  # for instance no network namespace to bind in: then there is no answer
                _server = _Server()


def stop() -> None:
    """Ends answering, at the last call."""
    global _server, _users
    with _lock:
        _users = max(_users - 1, 0)
        if _users == 0 and _server is not None:
            _server.stop()
            _server = None


def _forget() -> None:
    """A forked child has no thread, and its parent's name is not its own."""
    global _lock, _server, _users
    if _server is not None:
        _server._socket.close()
    _lock, _server, _users = threading.Lock(), None, 0


os.register_at_fork(after_in_child=_forget)


def ask(pid: int, seconds: float = 1.0) -> str | None:
    """The Python stacks of a process of this host.

    Args:
        pid: the process.
        seconds: how long to wait for the answer.

    Returns:
        Text, innermost call last; ``None`` if there is no answer in time.
    """
    pieces = []
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(seconds)
            asker.connect(_place(pid))
            while piece := asker.recv(65536):
                pieces.append(piece)
    except OSError:
        pass
    return b"".join(pieces).decode(errors="replace") or None


def own_stacks() -> str:
    """The Python stacks of this process: the main thread, then the replica threads."""
    frames = sys._current_frames()
    shown = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is threading.current_thread():
            continue
        if thread is threading.main_thread() or "replica" in thread.name.lower():
            calls = "".join(traceback.format_list(traceback.extract_stack(frame)[-_MOST_FRAMES:]))
            shown.append(f"thread {thread.name} (innermost call last):\n{calls}")
    return "".join(sorted(shown, key=lambda text: not text.startswith("thread MainThread"))).rstrip()
