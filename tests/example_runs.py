"""Running an example inside the present process, which may be one of several ranks."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAUNCHED: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ""}
"""The environment under a launcher; the rest of it is set by the plugin."""
ALONE = LAUNCHED | dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TFSTYLE_RENDEZVOUS_FILE", "TFSTYLE_TIMEOUT_SECONDS")
)
"""The environment of ``python example.py``, which no launcher started."""


@dataclass
class Player:
    """Plays examples as ``__main__`` on each rank of a test.

    Attributes:
        rank: of this process.
        world_size: how many ranks play.
        folder: one that all ranks share.
    """

    rank: int
    world_size: int
    folder: Path
    _played: int = 0

    def play(self, name: str, options: Sequence[str] = (), timeout: float = 60) -> str:
        """Runs an example.

        Returns:
            What all ranks printed, one rank after the other.

        Raises:
            SystemExit: If it ends with another exit status than 0.
        """
        self._played += 1
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(sys, "argv", [str(EXAMPLES / name), *options])
            patch.syspath_prepend(str(EXAMPLES))
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    end.add_note(f"{name} printed\n{printed.getvalue()}")
                    raise
        return self._of_all(printed.getvalue(), timeout)

    def _of_all(self, text: str, timeout: float) -> str:
        files = [self.folder / f"output-{self._played}-of-{rank}" for rank in range(self.world_size)]
        mine = files[self.rank]
        mine.with_suffix(".new").write_text(text, encoding="utf-8")
        mine.with_suffix(".new").rename(mine)
        end = time.monotonic() + timeout
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, f"the other ranks have not ended; this one printed\n{text}"
            time.sleep(0.01)
        return "".join(file.read_text(encoding="utf-8") for file in files)


def in_forms(*forms: tuple[str, int, Sequence[str]]) -> pytest.MarkDecorator:
    """Parametrizes ``options`` and runs the test on as many ranks as the form says.

    Args:
        forms: the name, the number of ranks (0: no launcher at all), and the options of the example.
    """
    return pytest.mark.parametrize(
        "options", [pytest.param(list(options), id=name, marks=on_ranks(ranks)) for name, ranks, options in forms]
    )


def on_ranks(count: int) -> pytest.MarkDecorator:
    """The marker for so many ranks of a launcher; 0 is one process without any."""
    environment = LAUNCHED if count else ALONE
    return pytest.mark.distributed(workers=max(count, 1), timeout=120, deadline=60, env=environment)
