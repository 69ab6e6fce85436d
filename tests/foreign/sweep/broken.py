"""Cases that are judged badly, or well for a reason: the tests of the measurement itself ask for this table."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
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


def _has_nothing_in_common(run: Run) -> Any:
    return torch.ones(2 if run.form == "one" else 3)


def _is_each_ranks_own(run: Run) -> Any:
    return float(os.environ.get("RANK", "0"))


add("broken", "agrees", trains(lambda: nn.Linear(6, 3), sgd))
add("broken", "hangs", _hangs, limit=5.0)
add("broken", "differs", _differs)
add("broken", "differs-as-documented", _differs, differs="for a reason")
add("broken", "has-nothing-in-common-as-documented", _has_nothing_in_common, differs="for a reason")
add("broken", "agrees-documented-to-differ", trains(lambda: nn.Linear(6, 3), sgd), differs="for a reason")
add("broken", "is-not-a-number", lambda run: float("nan"))
add("broken", "differs-between-ranks", _is_each_ranks_own, reference="ranks")
add("broken", "is-told-as-each-ranks-own", lambda run: {"own": run.each(run.replica)}, reference="ranks")
add("broken", "raises", _raises)
add("broken", "refused", _raises, refused="only here")
add("broken", "refused-in-other-words", _raises, refused="everywhere")
add("broken", "does-not-refuse", trains(lambda: nn.Linear(6, 3), sgd), refused="only here")
add("broken", "raises-as-one-device", _raises_everywhere, raises=r"ValueError: in \w+ too")
add("broken", "raises-by-mistake", _raises_everywhere)
add("broken", "raises-on-one-device-alone", _raises_on_one, raises="only there")
