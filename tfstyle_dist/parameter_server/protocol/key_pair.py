"""The key file of a cluster."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import Any

from tfstyle_dist.core import json_text

_MOST_BYTES = 1 << 12


@dataclass(frozen=True)
class Keys:
    """The key pair of a cluster: whoever has it belongs to the cluster.

    Attributes:
        public: printable public key.
        secret: printable secret key.
    """

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Reads a key file.

        Raises:
            PermissionError: others than the owner may read it.
            ValueError: not a key file.
        """
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            raise PermissionError(f"The key file {path} has mode {mode:o}: others may read it. Run: chmod 600 {path}")
        try:
            with open(path, "rb") as file:
                value = json_text.parse(file.read(_MOST_BYTES))
            if not isinstance(value, dict):
                raise ValueError("it holds no object")
            return cls(_key(value, "public"), _key(value, "secret"))
        except ValueError as error:
            raise ValueError(
                f"{path} is no key file ({error}); make one: python -m tfstyle_dist.parameter_server.keys {path}"
            ) from None


def _key(value: dict[str, Any], name: str) -> bytes:
    found = value.get(name)
    if not isinstance(found, str) or not re.fullmatch(r"[!-~]{40}", found):
        raise ValueError(f"its {name} key is no text of 40 characters")
    return found.encode("ascii")
