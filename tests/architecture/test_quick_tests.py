"""The quick tests are what they say: they exist, and a new room is not forgotten."""

from __future__ import annotations

from pathlib import Path

from quick import HERE, QUICK, is_quick

LEFT_OUT = {
    "compare_aggregation": "measures",
    "data": "holds files",
    "faults": "kills and waits",
    "foreign": "other people's packages",
    "fuzz": "many inputs",
    "gpu": "needs an accelerator, or the pretend one",
    "integrations": "needs the extras, and takes minutes",
    "launch": "starts many processes",
    "model_parallel": "starts many processes",
    "pretend_accelerator": "compiles a device",
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
