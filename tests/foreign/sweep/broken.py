"""Cases that are judged badly, or well for a reason: the tests of the measurement itself ask for this table."""

from __future__ import annotations

import time
from typing import Any

from programs import Run, add, sgd, trains
from torch import nn


def _hangs(run: Run) -> Any:
    if run.form != "one":
        time.sleep(60)
    return 1.0


def _differs(run: Run) -> Any:
    return float(run.form == "one")


def _raises(run: Run) -> Any:
    if run.form != "one":
        raise ValueError("only here")
    return 1.0


def _raises_on_one(run: Run) -> Any:
    if run.form == "one":
        raise ValueError("only there")
    return 1.0


def _raises_everywhere(run: Run) -> Any:
    raise ValueError(f"in {run.form} too")


add("broken", "agrees", trains(lambda: nn.Linear(6, 3), sgd))
add("broken", "hangs", _hangs, limit=3.0)
add("broken", "differs", _differs)
add("broken", "differs-as-documented", _differs, differs="for a reason")
add("broken", "raises", _raises)
add("broken", "refused", _raises, refused="only here")
add("broken", "refused-in-other-words", _raises, refused="everywhere")
add("broken", "does-not-refuse", trains(lambda: nn.Linear(6, 3), sgd), refused="only here")
add("broken", "raises-as-one-device", _raises_everywhere, raises=r"ValueError: in \w+ too")
add("broken", "raises-by-mistake", _raises_everywhere)
add("broken", "raises-on-one-device-alone", _raises_on_one, raises="only there")
