"""README.md: its Python code runs, its commands are those that CI takes, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def command(number: int) -> list[str]:
    """The lines of the bash block that directly follows the marker of a command."""
    found = re.search(rf"^<!-- command {number} -->\n```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found is not None, f"README.md has no bash block directly after <!-- command {number} -->"
    return found[1].splitlines()


def test_there_is_python_code() -> None:
    assert PYTHON_BLOCKS


def test_python_code_runs(tmp_path: Path) -> None:
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(PYTHON_BLOCKS), encoding="utf-8")  # each goes on where the last ended
    result = run_script([script], timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    loss = float(result.stdout.split()[-1])
    assert loss < 0.5, "the example does not learn"


@pytest.mark.parametrize("number", [1, 2])
def test_a_command_sets_itself_up(number: int) -> None:
    lines = command(number)
    assert lines[0] == "python3 -m venv .venv"
    assert lines[1].startswith(".venv/bin/pip install -c constraints.txt -e ")
    assert all(line.startswith(".venv/bin/") for line in lines[1:])


def test_command_1_runs_a_script_that_exists() -> None:
    program, script, *_ = shlex.split(command(1)[-1])
    assert program == ".venv/bin/python"
    assert (ROOT / script).is_file()


def test_command_2_runs_the_quick_tests() -> None:
    assert command(2)[-1] == ".venv/bin/pytest"


def test_links_lead_to_files() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert links
    assert not [target for target in links if not (ROOT / target).is_file()]


def test_every_environment_variable_of_the_package_is_listed() -> None:
    source = (ROOT / "tfstyle_dist" / "core" / "env.py").read_text(encoding="utf-8")
    assert not {name for name in re.findall(r"TFSTYLE_[A-Z_]+", source) if f"`{name}`" not in README}
