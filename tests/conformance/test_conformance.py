"""The programs recorded on real TensorFlow agree here, in one process with 1, 2 and 3 replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from facade import make
from results import differences, golden, record
from waiting import CATEGORIES, DEVIATIONS, WAITING

pytestmark = pytest.mark.timeout(660)  # the first one waits for the programs
WAITS_FOR = {case: area for area, cases in WAITING.items() for case in cases}
CASES = [(category, case) for category in CATEGORIES for case in sorted(golden()[category])]
STATUS = Path(__file__).parents[2] / "docs" / "status.md"


@pytest.fixture(scope="session")
def recorded() -> Mapping[str, Any]:
    """Our results of all these categories."""
    return record(CATEGORIES)


def parameters() -> list[Any]:
    """One test for each recorded program; those that wait must still disagree, or the list is stale."""
    return [
        pytest.param(
            category,
            case,
            id=f"{category}.{case}",
            marks=[pytest.mark.xfail(reason=f"waits for {area}", strict=True)]
            if (area := WAITS_FOR.get(f"{category}.{case}"))
            else [],
        )
        for category, case in CASES
    ]


@pytest.mark.parametrize(("category", "case"), parameters())
def test_agrees_with_tensorflow(category: str, case: str, recorded: Mapping[str, Any]) -> None:
    found = differences(category, case, recorded[category][case])
    meant = {place for place in DEVIATIONS if place.startswith(f"{category}.{case}/")}
    assert meant <= found.keys(), "these agree now: take them out of DEVIATIONS"
    wrong = [text for place, text in found.items() if place not in meant]
    assert not wrong, "\n".join(wrong)


def test_every_waiting_program_exists_and_is_explained() -> None:
    text = STATUS.read_text()
    unknown = [case for case in WAITS_FOR if case.partition(".")[2] not in golden()[case.partition(".")[0]]]
    assert not unknown
    deviating = [place.partition("/")[0] for place in DEVIATIONS]
    unexplained = [case for case in (*WAITS_FOR, *deviating) if f"`{case}`" not in text]
    assert not unexplained, "name these, with the reason, in docs/status.md"


def test_the_facade_knows_every_dtype_of_torch() -> None:
    facade = make()
    names = {str(found).removeprefix("torch.") for found in vars(torch).values() if isinstance(found, torch.dtype)}
    assert {"int16", "uint8", "complex64", "complex128", "float16", "bfloat16", "bool"} <= names
    for name in names:
        assert str(facade.dtype(name)) == f"torch.{name}"
    for name in ("int16", "complex64"):
        assert facade.dtype_name(facade.Variable([1, 2], dtype=name)) == name
        assert facade.dtype_name(facade.constant([1, 2], name)) == name
    with pytest.raises(ValueError, match="torch has no dtype 'nn'"):
        facade.dtype("nn")


def test_a_wrong_result_is_noticed() -> None:
    case = golden()["reduce"]["case_grid_vector_n2"]
    assert not differences("reduce", "case_grid_vector_n2", case)
    broken = {**case, "SUM/None": {"t": [4.0, 7.001]}}
    assert differences("reduce", "case_grid_vector_n2", broken)
