"""The quick tests are what they say: they exist, and a new room is not forgotten."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from quick import HERE, QUICK, is_quick

LEFT_OUT = {
    "compare_aggregation": "measures",
    "data": "holds files",
    "faults": "kills and waits",
    "foreign": "other people's packages",
    "fuzz": "many inputs",
    "gpu": "needs an accelerator, or the pretend one",
    "integrations": "needs the extras, and takes minutes",
    "kernels": "compiles kernels",
    "launch": "starts many processes",
    "model_parallel": "starts many processes",
    "pretend_accelerator": "compiles a device",
    "pretend_system": "starts many processes",
    "random_programs": "many programs",
    "testing": "tests of tests",
    "xla": "needs torch_xla",
}
"""Folders of which nothing is quick, and why."""


def test_what_is_chosen_exists() -> None:
    assert not [chosen for chosen in QUICK if not (HERE / chosen).exists()]


def test_every_folder_has_quick_tests_or_a_reason() -> None:
    rooms = {path.name for path in HERE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    chosen = {Path(name).parts[0] for name in QUICK}
    assert not rooms - chosen - LEFT_OUT.keys()


def test_slow_tests_are_not_quick() -> None:
    path = HERE / "core" / "test_torch_internals.py"
    assert is_quick(path, slow=False)
    assert not is_quick(path, slow=True)
    assert not is_quick(HERE / "faults" / "test_ranks.py", slow=False)


def test_the_files_of_others_are_not_even_imported(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    names = ("faults", "faults/test_ranks.py", "core", "core/test_torch_internals.py", "test_seeds.py")
    for part, left_out in (("quick", [names[1]]), ("rest", []), ("whole", [])):
        config = SimpleNamespace(workerinput={"part": part}, option=None)
        assert [name for name in names if conftest.pytest_ignore_collect(HERE / name, config)] == left_out
