"""Programs that nobody has written: replicas compute what copies do whose gradients are averaged by hand.

``TFSTYLE_RANDOM_PROGRAMS=2000`` runs as many; ``TFSTYLE_RANDOM_PROGRAMS_FROM`` is the first seed, so that others are
drawn. A program that fails is made as small as it can be, and printed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import pytest
from generate import BLOCK, FIRST, PROGRAMS, plan_of
from operations import Call, Plan, Step
from oracle import run_by_hand
from replicas import run_on_rank
from shrink import DIFFERS, IMPOSSIBLE, SAME, SIMPLEST, Outcome, outcome_of, shrunk
from snapshot import first_difference

ON_RANKS = 20
RANKS = 2
ON_THREE = PROGRAMS // 3
ON_ONE_COPY = PROGRAMS // 2
WRITES_TWICE = {
    "update_by_hand", "update_data_by_hand", "assign_data_in_step", "clip_weights", "multiply_weights", "load_in_step",
    "multiply_learning_rate", "step_scheduler_in_step", "step_with_momentum_by_hand", "new_optimizer_in_step",
    "multiply_state_in_step", "use_helper", "freeze_or_thaw", "update_flat", "write_to_aliases_in_step",
    "write_to_kept_state_in_step", "through_a_vector_in_step", "flatten_in_step", "average_into_teacher_in_step",
}  # fmt: skip
"""What a step of central storage may not do: both replicas would write to the one copy."""
MOST_IMPOSSIBLE = 0.1
"""What part of all programs may be such that plain PyTorch refuses them."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of torch, about programs that are odd
]


@pytest.fixture(scope="module")
def tally() -> Iterator[collections.Counter[str]]:
    """How often a program had which kind of outcome."""
    kinds: collections.Counter[str] = collections.Counter()
    yield kinds
    if (total := kinds.total()) >= 2 * BLOCK:
        assert kinds[IMPOSSIBLE] <= MOST_IMPOSSIBLE * total, f"too many programs cannot run at all: {dict(kinds)}"


def _report(plan: Plan) -> str:
    small, outcome = shrunk(plan)
    return f"{small}\n  {outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, BLOCK))
def test_programs(first: int, tally: collections.Counter[str]) -> None:
    failed = []
    for seed in range(first, min(first + BLOCK, FIRST + PROGRAMS)):
        outcome = outcome_of(plan_of(seed))
        tally[outcome.kind] += 1
        if outcome.fails:
            failed.append(seed)
    assert not failed, f"programs {failed} fail; made small, the first one is\n{_report(plan_of(failed[0]))}"


def _check(plans: Iterable[Plan], run: Callable[[Plan], Outcome]) -> None:
    kinds: collections.Counter[str] = collections.Counter()
    for plan in plans:
        outcome = run(plan)
        assert not outcome.fails, f"{plan}\n  {outcome.kind}: {outcome.text}"
        kinds[outcome.kind] += 1
    assert kinds[SAME] > kinds.total() // 2


@pytest.mark.cpu_only("devices have a test of their own")
def test_programs_of_central_storage() -> None:
    left_out = WRITES_TWICE | {"keep_state"}  # of the one optimizer, of which each replica would keep a copy
    plans = (plan_of(seed).without(left_out) for seed in range(FIRST, FIRST + ON_ONE_COPY))
    _check(plans, functools.partial(outcome_of, central=True))


def test_programs_that_are_looked_at_at_the_end() -> None:
    plans = map(plan_of, range(FIRST, FIRST + PROGRAMS))
    _check((dataclasses.replace(plan, often=False) for plan in plans if plan.often), outcome_of)


@pytest.mark.cpu_only("the devices are two")
def test_programs_on_three_replicas() -> None:
    _check(map(plan_of, range(FIRST, FIRST + ON_THREE)), functools.partial(outcome_of, replicas=3))


def _fails_where_it_saves_and_loads(plan: Plan) -> Outcome:
    names = [call.name for operation in plan.operations for call in getattr(operation, "calls", (operation,))]
    return Outcome(DIFFERS if {"save", "load_in_step"} <= {*names} else SAME)


def test_a_program_is_made_small() -> None:
    drawn = plan_of(0)
    steps = [place for place, operation in enumerate(drawn.operations) if isinstance(operation, Step)]
    last = drawn.operations[steps[-1]]
    loads = dataclasses.replace(last, calls=(*last.calls, Call("load_in_step", 1)))
    small, outcome = shrunk(
        dataclasses.replace(drawn, operations=(Call("save", 1), *drawn.operations, loads, *drawn.operations)),
        _fails_where_it_saves_and_loads,
    )
    assert outcome.kind == DIFFERS
    assert small.operations == (Call("save", 1), dataclasses.replace(loads, calls=(Call("load_in_step", 1),)))
    assert small.names == SIMPLEST


@pytest.mark.distributed(workers=RANKS, timeout=200, deadline=30)
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"], None], ids=["one", "two", "one copy"])
def test_programs_on_ranks(rank: int, devices: list[str] | None) -> None:
    each = len(devices or ["cpu:0"])
    for seed in range(FIRST, FIRST + ON_RANKS):
        plan = plan_of(seed)
        try:
            expected = run_by_hand(plan, always=True, replicas=RANKS * each)
        except Exception:
            continue  # counted above
        found = run_on_rank(plan, devices)
        for place, (copies, its) in enumerate(zip(expected, found, strict=True)):
            assert copies is not None
            difference = first_difference(copies[rank * each], its)
            assert difference is None, f"{plan}\n  rank {rank} after operation {place}: {difference}"
