"""What is said where Ray is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

FOUND = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(FOUND, reason="Ray is installed here")
def test_the_message_says_what_to_install() -> None:
    program = "import tfstyle_dist.integrations.ray"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    said = "needs Ray, which is not installed. Write pip install 'ray[train]' (the extra 'ray' of tfstyle_dist)."
    assert last.endswith(said)


@pytest.mark.skipif(not FOUND, reason="Ray is not installed: `make test-ray` runs the tests of this folder with it")
def test_the_tests_of_this_folder_run() -> None:
    """Passes where Ray is; elsewhere it is the one line that tells of tests which were not even collected."""
