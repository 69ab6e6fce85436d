"""Draws plans of programs."""

from __future__ import annotations

import os
import random

import between_objects  # noqa: F401  # its operations register themselves
import between_weights  # noqa: F401
import inside_backward  # noqa: F401
import inside_updates  # noqa: F401
import shared_memory  # noqa: F401
from objects import GROUPINGS, MODELS, OPTIMIZERS, SCHEDULERS, WITHOUT_TRACES
from operations import AFTER, BACKWARD, BEFORE, BETWEEN_STEPS, GRADIENTS, PLACES, UPDATE, VARYING, Call, Plan, Step

PROGRAMS = int(os.environ.get("TFSTYLE_RANDOM_PROGRAMS", "0")) or 60
FIRST = int(os.environ.get("TFSTYLE_RANDOM_PROGRAMS_FROM", "0"))
"""How many programs the tests draw, and the first one's seed."""
BLOCK = 10


def _call(chance: random.Random, names: list[str]) -> Call:
    return Call(chance.choice(names), chance.randrange(1000))


def _calls(chance: random.Random, names: list[str], counts: list[int]) -> list[Call]:
    return [_call(chance, names) for _ in range(chance.choice(counts))]


def _step(chance: random.Random, places: dict[str, list[str]]) -> tuple[Call, ...]:
    calls = _calls(chance, places[BEFORE], [0, 0, 1])
    for _ in range(chance.choice([1, 1, 1, 2])):
        if chance.random() < 0.7:
            calls.append(_call(chance, ["zero"]))
        calls.append(_call(chance, places[BACKWARD]))
        calls += _calls(chance, places[GRADIENTS], [0, 0, 1])
        if chance.random() < 0.85:
            calls.append(_call(chance, places[UPDATE]))
        calls += _calls(chance, places[AFTER], [0, 0, 1, 2])
    return tuple(calls)


def plan_of(seed: int) -> Plan:
    """The plan that a seed means.

    Args:
        seed: even: all replicas have the same examples, and any operation may occur. Odd: each has examples of its own,
            and what then differs between replicas is left out.
    """
    chance, same_data = random.Random(seed), seed % 2 == 0
    left_out = set() if same_data else VARYING
    places = {place: [name for name in names if name not in left_out] for place, names in PLACES.items()}
    names = {
        "model": chance.choice([*(MODELS if same_data else WITHOUT_TRACES)]),
        "optimizer": chance.choice([*OPTIMIZERS]),
        "grouping": chance.choice([*GROUPINGS]),
        "scheduler": chance.choice([*SCHEDULERS, "none", "none"]),
    }
    operations: list[Call | Step] = []
    for _ in range(chance.randrange(3, 9)):
        operations += _calls(chance, places[BETWEEN_STEPS], [0, 0, 1, 1, 2, 3])
        calls = _step(chance, places)
        operations += [Step(calls, chance.randrange(10**6)) for _ in range(chance.choice([1, 1, 2, 3]))]
    return Plan(seed, same_data, names, tuple(operations), often=seed % 3 == 0)
