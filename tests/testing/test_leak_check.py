"""The leak check, and what importing the plugin costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from inner_pytest import InnerPytest

import tfstyle_dist.testing


def test_leaks_fail_the_test_that_leaves_them(inner: InnerPytest) -> None:
    inner.pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(autouse=True)
        def check(no_leaks):
            pass
        """
    )
    result = inner.run(
        source="""
        import os
        import subprocess
        import sys
        import threading
        import uuid

        import pytest

        def test_leaves_much():
            os.environ["LEFT_VARIABLE"] = "1"
            threading.Thread(target=threading.Event().wait, daemon=True, name="left-thread").start()
            subprocess.Popen(["sleep", "30"])

        @pytest.mark.distributed(workers=1)
        def test_shared_memory(request):
            path = f"/dev/shm/tfstyleleak-{uuid.uuid4().hex}"
            file = open(path, "w")  # stays open: tests beside this one see whose it is
            request.config.add_cleanup(lambda: (file.close(), os.remove(path)))

        def test_clean(monkeypatch, tmp_path):
            monkeypatch.setenv("PUT_BACK", "1")
            threading.Thread(target=lambda: None).start()
            subprocess.run([sys.executable, "-c", "pass"], check=True)

        @pytest.mark.distributed
        def test_clean_ranks(monkeypatch, rank):
            monkeypatch.setenv("PUT_BACK", "1")
        """,
    )
    result.assert_outcomes(passed=3, errors=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "the test left behind:",
            "  environment variable LEFT_VARIABLE (was None, is '1')",
            "  thread 'left-thread'",
            "  child process *",
            "  file /dev/shm/tfstyleleak-*",
        ]
    )


def test_importing_the_plugin_is_cheap() -> None:
    # A stand-in for the package, because what the package itself imports is not the plugin's doing.
    root = Path(tfstyle_dist.testing.__file__).parent.parent
    code = f"""
import sys, types
package = types.ModuleType("tfstyle_dist")
package.__path__ = [{str(root)!r}]
sys.modules["tfstyle_dist"] = package
import pytest
import tfstyle_dist.testing.plugin, tfstyle_dist.testing.fixtures
print(*sorted({{"torch", "multiprocessing", "tfstyle_dist.testing.engine"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
