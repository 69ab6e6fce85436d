"""The command ``tfstyle-dist foreign``: other people's code in every form, compared with one device.

The programs and the table of cases are a part of the source tree, not of the wheel: ``tests/foreign/sweep``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TREE = Path(__file__).parents[2]
PROGRAM = Path("tests", "foreign", "sweep", "measure.py")


def program() -> Path | None:
    """The program that measures, of the tree that this package lies in or of the working folder."""
    return next((folder / PROGRAM for folder in (TREE, Path.cwd()) if (folder / PROGRAM).is_file()), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures as ``make foreign`` does.

    Args:
        arguments: the command line without the program's name; default: that of the process.

    Returns:
        The exit status: 1 if a case neither agrees nor is explained, 2 if there is no source tree.
    """
    found = program()
    if found is None:
        print(
            f"tfstyle-dist foreign needs the source tree, whose {PROGRAM} measures, and neither {TREE} nor the working "
            "folder is one. Unpack the sdist of the same version, and run the command in its folder.",
            file=sys.stderr,
        )
        return 2
    given = sys.argv[1:] if arguments is None else arguments
    return subprocess.run([sys.executable, str(found), *given], check=False).returncode
