"""Every tutorial of the site is shown with what it printed: docs/site/output, by docs/site/print_tutorials.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "site" / "output"
PRINTING = runpy.run_path(str(ROOT / "docs" / "site" / "print_tutorials.py"))
COMMANDS = PRINTING["COMMANDS"]


def test_every_example_has_a_command_and_an_output() -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert set(COMMANDS) == examples, "COMMANDS of docs/site/print_tutorials.py runs each example"
    missing = examples ^ {path.stem for path in OUTPUT.glob("*.txt")}
    assert not missing, f"run python docs/site/print_tutorials.py {' '.join(sorted(missing))} and commit its output"


@pytest.mark.parametrize("path", sorted(OUTPUT.glob("*.txt")), ids=lambda path: path.stem)
def test_an_output_is_that_of_its_command(path: Path) -> None:
    first, *printed = path.read_text(encoding="utf-8").splitlines()
    assert first == PRINTING["shown"](path.stem), f"run python docs/site/print_tutorials.py {path.stem} again"
    assert any(printed), "it prints something"
    assert not re.findall(r"(?:^|[\s'\"(=])/\w+/\S*", "\n".join(printed)), "paths of one machine"
