"""Keys of parameter server clusters on Ray, in files that only one process can open."""

from __future__ import annotations

import json
import os
import threading

from tfstyle_dist.core import env


class PrivateFile:
    """A file without a name, which ends with the process, for what only reads paths.

    Args:
        content: of the file.

    Attributes:
        path: to open it by, in this process alone.
    """

    def __init__(self, content: bytes) -> None:
        self._number = os.memfd_create("tfstyle-key")
        os.fchmod(self._number, 0o600)
        os.write(self._number, content)
        self.path = f"/proc/self/fd/{self._number}"

    def close(self) -> None:
        """The content is gone."""
        os.close(self._number)


class GeneratedKey:
    """The key of this process's clusters to which the user gave none, in ``TFSTYLE_PS_KEYS`` while one of them is open.

    That variable holds one path, so clusters that are open at the same time have the same key.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a cluster that nobody holds any more may end while another one begins
        self._clusters, self._content = 0, b""
        self._file: PrivateFile | None = None

    def take(self) -> bytes | None:
        """The generated key, for one more cluster; ``None`` where the user has given one."""
        from tfstyle_dist.parameter_server.protocol import zeromq_sockets

        with self._lock:
            if env.parameter_server_keys() not in (None, self._file and self._file.path):
                return None
            if self._file is None:
                self._content = json.dumps(zeromq_sockets.key_pair()).encode()
                self._file = PrivateFile(self._content)
            env.set_parameter_server_keys(self._file.path)
            self._clusters += 1
            return self._content

    def give_back(self) -> None:
        """A cluster that took it has ended; with the last one the key is gone."""
        with self._lock:
            self._clusters -= 1
            if self._clusters or self._file is None:
                return
            if env.parameter_server_keys() == self._file.path:
                env.set_parameter_server_keys(None)
            self._file.close()
            self._file, self._content = None, b""
