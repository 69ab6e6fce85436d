"""Fixtures for the tests of the test harness."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from inner_pytest import InnerPytest

import tfstyle_dist.testing


@pytest.fixture
def inner(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InnerPytest:
    """A session without other plugins, in which the package is no more than the folder of its modules.

    The harness needs nothing else of it, and dozens of short-lived processes would each import torch.
    """
    package = tmp_path / "stand_in" / "tfstyle_dist"
    package.mkdir(parents=True)
    folder = Path(tfstyle_dist.testing.__file__).parent.parent
    (package / "__init__.py").write_text(f"__path__ = [{str(folder)!r}]\n")
    search_path = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, search_path)))
    # With it pytest would find an installed plugin a second time, under another name, and refuse it.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return InnerPytest(pytester)
