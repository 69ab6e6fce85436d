"""The key file of a cluster."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path


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
            value = json.loads(Path(path).read_text())
            return cls(value["public"].encode("ascii"), value["secret"].encode("ascii"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no key file ({error}); make one: python -m tfstyle_dist.parameter_server.keys {path}"
            ) from None
