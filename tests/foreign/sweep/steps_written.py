"""The steps of the ordinary tests (``tests/foreign/idioms*.py``), in every form."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from programs import DRAWS, Program, Run, add

sys.path.insert(0, str(Path(__file__).parents[1]))

import idioms
import idioms_of_graphs  # noqa: F401  # its cases join those of idioms
import idioms_of_libraries  # noqa: F401


def _program(name: str) -> Program:
    def program(run: Run) -> Any:
        with run.scope():
            model, step = idioms.CASES[name]()

        def share(i: int) -> None:
            step(*run.xy(i))

        run.go(share)
        return run.result(model)

    return program


REFUSED = {"optimizer_in_an_optimizer": {"central": r"Lookahead.step\(\) called SGD.step"}}
"""Of the message, where replicas of one process share parameters and optimizer."""

for _name in idioms.CASES:
    _differs = {"elastic": DRAWS} if _name == "optimizer_that_draws_random_numbers" else {}
    add("steps", f"written-{_name}", _program(_name), refused=REFUSED.get(_name, {}), differs=_differs)
