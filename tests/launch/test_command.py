"""The command ``tfstyle-dist``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfstyle_dist
from tfstyle_dist import cli
from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.monitoring import ReplicaTimes, Report, saved
from tfstyle_dist.testing import foreign

ROOT = Path(__file__).parents[2]

COMMANDS = ("launch", "doctor", "compare", "keys", "foreign", "report")


def status(*arguments: str) -> int:
    """The exit status of a command line."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)
    assert status("--version") == 0
    assert capsys.readouterr().out == f"tfstyle_dist {tfstyle_dist.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_help(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert status(command, "--help") == 0
    assert capfd.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("arguments", [(), ("luanch",)])
def test_wrong_commands(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*arguments) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_rest_of_the_line_belongs_to_the_command(tmp_path: Path) -> None:
    """Options of the program that is started too, and its exit status comes back."""
    program = tmp_path / "program.py"
    program.write_text("import sys; assert sys.argv[1:] == ['--steps', '3', '--help'], sys.argv; sys.exit(7)")
    command = [sys.executable, "-m", "tfstyle_dist.cli", "launch", "--workers", "1", str(program)]
    done = subprocess.run([*command, "--steps", "3", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr


def test_foreign_measures_from_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tree of the package, else that of the working folder; neither is there where a wheel was installed alone."""
    assert foreign.program() == ROOT / foreign.PROGRAM
    monkeypatch.setattr(foreign, "TREE", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert status("foreign", "--list") == 2
    assert "Unpack the sdist of the same version, and run the command in its folder" in capfd.readouterr().err
    written = tmp_path / foreign.PROGRAM
    written.parent.mkdir(parents=True)
    written.write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(3)")
    assert status("foreign", "--list", "--case", "hook") == 3
    assert capfd.readouterr().out == "__main__ ['--list', '--case', 'hook']\n"


def a_report() -> Report:
    """Two replicas, the second one slower."""
    times = [ReplicaTimes(r, 0, "cpu", (0.001, 0.01 * (r + 1), 0.002, 0.01, 0.003, 0.001), 0.0005) for r in (0, 1)]
    recent = tuple((0.03, times[0].seconds) for _ in range(5))
    return Report("train_step", 5, 6, 0.03, 0.029, 0.04, 0.5, tuple(times), (("eval_step", 2, 0.01),), recent)


def test_saved_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    a_report().save(path)
    assert saved.load(path) == a_report()
    assert status("report", str(path), "--plot", str(tmp_path / "report.png")) == 0
    assert capsys.readouterr().out.startswith(str(a_report()))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataLossError, match="no saved report: it has no report in it"):
        saved.load(tmp_path / "other.json")
    assert status("report", str(tmp_path / "other.json")) == 2
    assert "Report.save(path) writes one" in capsys.readouterr().err
    assert status("report", str(tmp_path / "absent.json")) == 2
