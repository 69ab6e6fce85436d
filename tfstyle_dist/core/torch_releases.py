"""Which releases of torch the tests were run with."""

from __future__ import annotations

import re
from functools import cache

from tfstyle_dist.core.logging import warn_once

OLDEST = (2, 9)
"""The oldest torch that the tests are run with."""

NEWEST = (2, 15)
"""The newest one; ``docs/status.md`` says what was run with which."""


@cache
def release(version: str) -> tuple[int, ...]:
    """The two first numbers of a version: ``(2, 16)`` for ``"2.16.0a0+git1234"``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def warn_if_untested(version: str) -> None:
    """Says, once, that nobody has run the tests with a torch as new as this one."""
    if release(version) > NEWEST:
        warn_once(
            "untested torch",
            f"torch {version} is newer than the newest that tfstyle_dist was tested with ("
            f"{'.'.join(map(str, NEWEST))}). All that it needs of torch is there. To see that it still means the same, "
            "run `make canary` in a clone of tfstyle_dist.",
        )
