"""Programs drawn at random do here what they did on TensorFlow: on one process, and on two workers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

import drawn_inputs
import pytest
from drawn_plans import WORKERS, drawn
from drawn_runs import Run
from facade import Facade
from results import HERE, TOLERANCES, load_compare

import tfstyle_dist as td

sys.path.insert(0, str(HERE))
import harness


@functools.cache
def recorded(file: str = "drawn_golden.json") -> Mapping[str, Any]:
    """TensorFlow's results (``record_drawn.py``)."""
    return json.loads((HERE / file).read_text())  # type: ignore[no-any-return]


inputs = functools.partial(recorded, "drawn_inputs_golden.json")


def differences(seed: str, program: Mapping[str, Any], expected: list[Any], found: list[Any]) -> list[str]:
    """What a program gave elsewhere than in TensorFlow, but for errors that are accidents there."""
    compare, wrong = load_compare(), []
    operations = [*program.get("reads", program["operations"]), *["content of a variable"] * len(expected)]
    if len(expected) != len(found):
        wrong.append(f"program {seed}: {len(found)} results instead of {len(expected)}")
    for operation, there, here in zip(operations, expected, found, strict=False):
        out: list[Any] = []
        compare.leaves(there, here, "", out, TOLERANCES)
        wrong += [
            f"program {seed}, {program['kind']} of {program['n']}: {json.dumps(operation)}\n    TensorFlow "
            f"{json.dumps(wanted)[:300]}\n    here       {json.dumps(got)[:300]}"
            for _, good, wanted, got in out
            if not good and not (compare.is_error(wanted) and wanted["error"] in compare.SOFT)
        ]
    return wrong


@pytest.mark.parametrize("seed", recorded()["programs"])
def test_a_drawn_program_agrees_with_tensorflow(seed: str) -> None:
    program = drawn(int(seed))
    xp = Facade()
    with xp.strategy(program["kind"], program["n"]) as strategy:
        found = harness.jsonable(Run(xp, program, strategy).results())
    wrong = differences(seed, program, recorded()["programs"][seed], found)
    assert not wrong, "\n".join(wrong)


@pytest.mark.distributed(workers=2, timeout=120)
def test_drawn_programs_agree_on_two_workers(rank: int) -> None:
    wrong = []
    with td.MultiWorkerMirroredStrategy() as strategy:
        for seed, expected in recorded()["workers"].items():
            program = drawn(int(seed), WORKERS)
            found = harness.jsonable(Run(Facade(), program, strategy).results())
            wrong += differences(seed, program, expected[rank], found)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", inputs()["programs"])
def test_a_drawn_input_agrees_with_tensorflow(seed: str) -> None:
    program, xp = drawn_inputs.drawn(int(seed)), Facade()
    with xp.strategy(program["kind"], program["n"]) as strategy:
        found = harness.jsonable(drawn_inputs.Reading(xp, program, strategy).results())
    wrong = differences(seed, program, inputs()["programs"][seed], found)
    assert not wrong, "\n".join([str(program), *wrong])


@pytest.mark.distributed(workers=2, timeout=120)
def test_drawn_inputs_agree_on_two_workers(rank: int) -> None:
    wrong = []
    with td.MultiWorkerMirroredStrategy() as strategy:
        for seed, expected in inputs()["workers"].items():
            program = drawn_inputs.drawn(int(seed), 2)
            found = harness.jsonable(drawn_inputs.Reading(Facade(), program, strategy).results())
            wrong += differences(seed, program, expected[rank], found)
    assert not wrong, "\n".join(wrong)


def test_a_wrong_result_is_noticed() -> None:
    seed, expected = next((s, e) for s, e in recorded()["programs"].items() if e[-1] not in ([], [[]]))
    assert not differences(seed, drawn(int(seed)), expected, expected)
    assert differences(seed, drawn(int(seed)), expected, [*expected[:-1], [17.5]])
    assert differences(seed, drawn(int(seed)), expected, expected[:-1])
