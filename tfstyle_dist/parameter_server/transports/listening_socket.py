"""A listening socket beside ZeroMQ: takes connections, and refuses those that are too many."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from tfstyle_dist.core.logging import get_logger

_MOST = 4096
_NO_FILES = {errno.EMFILE, errno.ENFILE}


class ListeningSocket:
    """Takes connections one by one.

    One that no open file is left for is ended at once: it would wake the server again and again until it is taken. Its
    client goes on by ZeroMQ.

    Args:
        listening: bound; it is closed with this.
        name: of the server, for messages.
    """

    def __init__(self, listening: socket.socket, name: str) -> None:
        self._socket, self._name, self._said = listening, name, False
        self._spare: int | None = None  # an open file, given up to take a connection for which there is none
        listening.listen(128)
        listening.setblocking(False)
        self.number = listening.fileno()
        self._keep_spare()

    def accept(self, count: int) -> socket.socket | None:
        """The next connection.

        Args:
            count: of the connections that there are.

        Returns:
            It; ``None``: it is gone, or there are too many.
        """
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_FILES:
                self._refuse(error)
            return None
        if count >= _MOST:
            connection.close()
            return None
        return connection

    def _refuse(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            get_logger().warning(
                "%s has no file left for a connection (%s); clients go on by ZeroMQ. Raise the limit: ulimit -Hn 65536 "
                "(as root).", self._name, error.strerror,
            )  # fmt: skip
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()
        self._keep_spare()

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Takes no more."""
        self._socket.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
