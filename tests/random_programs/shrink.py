"""What came of a program, and a small program of which the same comes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from objects import GROUPINGS, MODELS, OPTIMIZERS
from operations import Plan, Step
from oracle import REPLICAS, run_by_hand
from replicas import run_in_process
from snapshot import IN_DOUBLE, TOLERANCE, first_difference

SAME, DIFFERS, REFUSED, IMPOSSIBLE = "same", "differs", "refused by the package", "refused by torch"
MOST_TRIES = 300
SIMPLEST = {
    "model": next(iter(MODELS)),
    "optimizer": next(iter(OPTIMIZERS)),
    "grouping": next(iter(GROUPINGS)),
    "scheduler": "none",
}
KNOWN_REFUSALS: tuple[str, ...] = ()
"""Patterns of errors with which the package may refuse a program that plain PyTorch can run."""


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        kind: one of the words above.
        text: the first difference, or the error.
        error: the name of the error's class.
    """

    kind: str
    text: str = ""
    error: str = ""

    @property
    def fails(self) -> bool:
        """Whether it is the package's fault."""
        known = any(re.search(pattern, self.text) for pattern in KNOWN_REFUSALS)
        return self.kind == DIFFERS or (self.kind == REFUSED and not known)

    def is_like(self, other: Outcome) -> bool:
        """Whether two programs fail the same way."""
        return (self.kind, self.error) == (other.kind, other.error)


def raised(kind: str, error: Exception) -> Outcome:
    """The outcome of a program that raised an error."""
    return Outcome(kind, f"{type(error).__name__}: {error}", type(error).__name__)


def outcome_of(plan: Plan, central: bool = False, replicas: int = REPLICAS) -> Outcome:
    """Runs a program by hand and by the package.

    One that differs is run again in double precision: where gradients of the replicas cancel out, the rounding of the
    larger ones is left, and may be more than ``TOLERANCE`` of their mean.

    Args:
        plan: of it.
        central: whether the replicas have one copy of the parameters.
        replicas: their number.
    """
    outcome = _outcome_of(plan, central, replicas)
    if outcome.kind != DIFFERS:
        return outcome
    single = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _outcome_of(plan, central, replicas, IN_DOUBLE)
    finally:
        torch.set_default_dtype(single)


def _outcome_of(plan: Plan, central: bool, replicas: int, tolerance: float = TOLERANCE) -> Outcome:
    try:
        expected = run_by_hand(plan, replicas=replicas)
    except Exception as error:
        return raised(IMPOSSIBLE, error)
    try:
        found = run_in_process(plan, central, replicas)
    except Exception as error:
        return raised(REFUSED, error)
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        for replica, (ours, its) in enumerate(zip(one or (), other or (), strict=True)):
            if (text := first_difference(ours, its, tolerance)) is not None:
                return Outcome(DIFFERS, f"replica {replica} after {place}. {plan.operations[place]}: {text}")
    return Outcome(SAME)


Edit = Callable[[Plan], Plan]


def _without_operation(plan: Plan, place: int) -> Plan:
    return replace(plan, operations=(*plan.operations[:place], *plan.operations[place + 1 :]))


def _without_call(plan: Plan, place: int, number: int) -> Plan:
    step = plan.operations[place]
    assert isinstance(step, Step)
    smaller = replace(step, calls=(*step.calls[:number], *step.calls[number + 1 :]))
    return replace(plan, operations=(*plan.operations[:place], smaller, *plan.operations[place + 1 :]))


def _with_name(plan: Plan, part: str, name: str) -> Plan:
    return replace(plan, names={**plan.names, part: name})


def _fewer_operations(plan: Plan) -> Iterator[Edit]:
    for place in reversed(range(len(plan.operations))):
        yield functools.partial(_without_operation, place=place)


def _fewer_calls(plan: Plan) -> Iterator[Edit]:
    for place, operation in enumerate(plan.operations):
        for number in reversed(range(len(operation.calls) if isinstance(operation, Step) else 0)):
            yield functools.partial(_without_call, place=place, number=number)


def _simpler_names(plan: Plan) -> Iterator[Edit]:
    for part, name in SIMPLEST.items():
        if plan.names[part] != name:
            yield functools.partial(_with_name, part=part, name=name)


def shrunk(plan: Plan, run: Callable[[Plan], Outcome] = outcome_of) -> tuple[Plan, Outcome]:
    """Takes from a program that fails what it fails without.

    Args:
        plan: of it.
        run: what says how it fails.

    Returns:
        The plan of a small program, and what came of it.
    """
    outcome, tries, went_on = run(plan), 0, True
    while went_on:
        went_on = False
        for edits_of in (_fewer_operations, _fewer_calls, _simpler_names):
            for edit in edits_of(plan):  # in an order in which one leaves the places of the next ones as they were
                smaller = edit(plan)
                if not smaller.operations or tries == MOST_TRIES:
                    continue
                tries += 1
                if (found := run(smaller)).is_like(outcome):
                    plan, outcome, went_on = smaller, found, True
    return plan, outcome
