"""Other people's code against one device: a small part of what ``make foreign`` measures, and how it measures."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from started_together import clean_environment

MEASURE = Path(__file__).parent / "sweep" / "measure.py"
SECONDS = 240

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.timeout(SECONDS + 30)]

STEPS = ("sam-class", "ema-moco", "trainer-actor-critic", "freeze-thaw-in-step", "parameter-subclass-attrs")
STEPS += (
    "raises-after-backward-step",
    "raises-before-backward-weight",
    "2nd-gradnorm",
    "hook-optimizer",
    "agrad-unreduced",
)
TORCH = ("Adafactor-maximize", "NAdam-capturable", "scaler-outside-unscale-inf", "average-ema-foreach-outside-in-step")
TORCH += ("LBFGS", "torch-OneCycleLR-in-scope-in-step", "transformers-cosine-in-scope-in-step")
FORMS = "replicas", "ranks", "shared"
MODELS = ("transformers/mixtral", "transformers/t5", "transformers/vit-with-dropout")


OUTSIDE = ("scaler-outside", "scaler-in-parts", "average", "after-backward", "of-one-tensor", "EMADict", "clip")
OUTSIDE += ("Adafactor-outside", "SGD-outside", "OneCycleLR-outside", "ReduceLROnPlateau-outside", "cosine-outside")
OUTSIDE += (
    "edited",
    "step-outside",
    "replace-head",
    "replace-parameter",
    "train-outside",
    "from_outside",
    "changes-outside",
)


def measured(folder: Path, arguments: Sequence[str], device: str = "cpu") -> tuple[int, list[dict[str, Any]], str]:
    """Runs the measurement: its exit code, its verdicts and its table."""
    results, table = folder / "verdicts.json", folder / "table.md"
    command = [sys.executable, "-P", str(MEASURE), *arguments, "--json", str(results), "--out", str(table)]
    clean = {name: value for name, value in clean_environment().items() if not name.startswith("TFSTYLE_")}
    clean["TFSTYLE_FOREIGN_DEVICE"] = device
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode in (0, 1), done.stderr
    verdicts = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return done.returncode, verdicts, table.read_text(encoding="utf-8")


@pytest.mark.parametrize(("group", "parts"), [("steps", STEPS), ("torch", TORCH), ("transformers", MODELS)])
def test_a_part_of_the_cases_agrees(tmp_path: Path, group: str, parts: Sequence[str]) -> None:
    if importlib.util.find_spec("transformers") is None and any(part.startswith("transformers") for part in parts):
        pytest.skip("transformers is not installed")
    code, verdicts, _ = measured(tmp_path, ["--group", group, "--case", *parts, "--forms", *FORMS])
    assert code == 0, [v for v in verdicts if v["verdict"] not in ("agrees", "refused", "differs as documented")]
    assert all(any(part in v["case"] for v in verdicts) for part in parts), "a case was not run"
    assert {v["form"] for v in verdicts} == {*FORMS}


@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend accelerator is compiled with g++")
def test_what_is_done_outside_of_run_agrees_on_a_device(tmp_path: Path) -> None:
    """Also where the parameters are on the CPU and the replicas compute on the device."""
    what = ["--group", "torch", "steps", "--case", *OUTSIDE, "--forms", "replicas", "central", "--together"]
    code, verdicts, _ = measured(tmp_path, what, "pretend")
    good = ("agrees", "refused", "differs as documented", "is written for the CPU")
    assert code == 0, [v for v in verdicts if v["verdict"] not in good]
    assert sum(v["verdict"] == "agrees" for v in verdicts) > 100


def test_every_file_of_steps_is_in_the_table() -> None:
    (tables,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(MEASURE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TABLES"
    )
    files = {path.stem for path in MEASURE.parent.glob("steps_*.py")} - {"steps_module"}  # which others import
    assert set(tables["steps"]) == files


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    code, verdicts, table = measured(tmp_path, ["--group", "broken"])
    assert code == 1
    expected = {
        "agrees": "agrees", "hangs": "hangs", "differs": "differs", "differs-as-documented": "differs as documented",
        "has-nothing-in-common-as-documented": "differs", "agrees-documented-to-differ": "agrees, documented to differ",
        "is-not-a-number": "is no case", "differs-between-ranks": "agrees", "is-told-as-each-ranks-own": "agrees",
        "raises": "raises", "refused": "refused", "refused-in-other-words": "raises", "does-not-refuse": "raises",
        "raises-as-one-device": "agrees", "raises-by-mistake": "is no case", "raises-on-one-device-alone": "differs",
    }  # fmt: skip
    differs = expected | {"differs-between-ranks": "differs"}
    by_form = {"replicas": expected, "ranks": differs, "shared": differs}
    for form, words in by_form.items():
        assert {v["case"].removeprefix("broken/"): v["verdict"] for v in verdicts if v["form"] == form} == words
    hung = next(v for v in verdicts if v["verdict"] == "hangs")
    assert "_hangs" in hung["said"], "the stack of a hang is shown"
    cells = [f"{agree} of 14 + 1 refused + 1 documented, **1 hang**" for agree in (4, 3)]
    assert f"| broken | 16 | {' | '.join(cells)} |" in table
    assert "broken/refused-in-other-words" in table.partition("## What is refused")[0]
