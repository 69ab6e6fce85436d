"""A worker shows other workers of its host where its Python threads are, even while it does not take part.

A thread waits at a socket in Linux's abstract namespace, which leaves no file behind. Its name is drawn, so nobody can
take it before, and the other workers are told it; only processes of the same user get an answer. It costs nothing until
somebody asks.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress

from tfstyle_dist.core import unix_sockets

_MOST_FRAMES, _MOST_BYTES = 8, 20_000
_SEND_SECONDS, _PAUSE_SECONDS = 1.0, 0.2


class _Server:
    """Answers until it is stopped."""

    def __init__(self) -> None:
        self.name = unix_sockets.new_name("stacks")
        self._socket = unix_sockets.listen(self.name, 8)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="tfstyle_dist stacks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._socket.close()
            raise

    def _answer(self) -> None:
        while not self._ends.is_set():
            try:
                asker, _ = self._socket.accept()
            except OSError:  # the end, or for a while there is no file left for a connection
                self._ends.wait(_PAUSE_SECONDS)
                continue
            with asker, suppress(OSError):
                if unix_sockets.is_same_user(asker):
                    asker.settimeout(_SEND_SECONDS)
                    asker.sendall(own_stacks().encode()[:_MOST_BYTES])

    def stop(self) -> None:
        """Ends the thread."""
        self._ends.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(1)
        self.close()

    def close(self) -> None:
        """Closes the socket."""
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
            with suppress(OSError, RuntimeError):  # no file left for a socket, or no thread: then there is no answer
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
        _server.close()
    _lock, _server, _users = threading.Lock(), None, 0


os.register_at_fork(after_in_child=_forget)


def socket_name() -> str:
    """Where this process answers, for ``ask``; empty if it does not."""
    server = _server
    return "" if server is None else server.name


def ask(name: str, seconds: float = 3.0) -> str | None:
    """The Python stacks of a process of this host and user.

    Args:
        name: what ``socket_name`` gives there.
        seconds: how long to wait for the whole answer.

    Returns:
        Text, innermost call last; ``None`` if there is no answer in time. What comes too late or is too much is left
        out.
    """
    text, end = b"", time.monotonic() + seconds
    with suppress(OSError), unix_sockets.connect(name, seconds) as asker:
        left = max(end - time.monotonic(), 0.05)
        while len(text) < _MOST_BYTES and left > 0:
            asker.settimeout(left)
            piece = asker.recv(_MOST_BYTES - len(text))
            if not piece:
                break
            text += piece
            left = end - time.monotonic()
    return text.decode(errors="replace") or None


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
