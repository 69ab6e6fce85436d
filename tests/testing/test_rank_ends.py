"""What a rank process leaves when it ends, how it ends, and when it must end for another file."""

from __future__ import annotations

import time

import pytest
from inner_pytest import InnerPytest

from tfstyle_dist.testing import processes


def test_nothing_outlives_the_ranks(inner: InnerPytest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a child that has a session and an environment of its own, nor a directory."""
    temporary = inner.pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    result = inner.run(
        "-p",
        "no:tmpdir",
        source="""
        import subprocess
        from pathlib import Path

        import pytest

        @pytest.mark.distributed(workers=1)
        def test_child():
            child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
            Path(__file__).with_name("child").write_text(str(child.pid))
        """,
    )
    result.assert_outcomes(passed=1)
    child = int(inner.lines("child")[0])
    end = time.monotonic() + 10
    while (alive := processes.state(child) not in ("", "Z")) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive
    assert list(temporary.glob("tfstyle_dist-*")) == []


def test_signals(inner: InnerPytest) -> None:
    """One that has no name, and a handler of the test's own for the one that asks for stacks elsewhere."""
    result = inner.run(
        source="""
        import os
        import signal
        import time

        import pytest

        @pytest.mark.distributed(workers=1)
        def test_nameless():
            os.kill(os.getpid(), signal.SIGRTMIN + 5)

        @pytest.mark.distributed(workers=1, timeout=8)
        def test_handler():
            signal.signal(signal.SIGUSR1, lambda number, frame: None)
            time.sleep(60)
        """,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*rank 0 of 1 died with signal 39 before it reported*", '*test_signals.py"*test_handler']
    )


def test_a_conftest_that_works_once_in_a_process(inner: InnerPytest) -> None:
    """The second file gets new processes; its folder has the bracket with which ids of parameters begin."""
    inner.pytester.makeconftest(
        """
        import multiprocessing

        multiprocessing.set_start_method("spawn")
        """
    )
    source = "import pytest\n@pytest.mark.distributed(workers=1)\ndef test_it(): pass\n"
    inner.pytester.makepyfile(test_first=source)
    folder = inner.pytester.mkdir("x [1]")
    (folder / "test_second.py").write_text(source)
    (folder / "test_third.py").write_text("def test_plain(): pass\n")
    inner.run().assert_outcomes(passed=3)
