"""A checkpoint that is to be written: where, by which call, and what follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from tfstyle_dist.checkpoint.files import check_local

Then = Callable[[str, float], None]
"""Called with the path of a checkpoint and the time of its save."""


def do_nothing(path: str, time: float) -> None:
    """What follows ``write``: the folder's latest checkpoint stays what it is."""


@dataclass(frozen=True)
class Planned:
    """A checkpoint that is to be written.

    Args:
        path: as the program gave it, for messages and results.
        what: the call that saves, for messages.
        numbered: whether all checkpoints of this name with other numbers are the program's own, too.
        on_commit: called with ``path`` on worker 0 when it exists, maybe in another thread.

    Attributes:
        place: the same path, for files: it stays what it is when the program goes to another folder meanwhile.
    """

    path: str
    what: str
    numbered: bool = False
    on_commit: Then = do_nothing
    place: str = field(init=False)

    def __post_init__(self) -> None:
        check_local(self.path)
        object.__setattr__(self, "place", os.path.abspath(self.path))
