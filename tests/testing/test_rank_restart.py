"""Ranks that are started again in the middle of a test, and sessions spread by xdist."""

from __future__ import annotations

import pytest
from inner_pytest import InnerPytest


def test_restarted_rank_runs_the_body_again(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
    import os
    import time

    import pytest

    @pytest.mark.distributed(workers=2, timeout=40)
    @pytest.mark.parametrize("how", ["killed", "alive", "itself"])
    def test_comes_back(rank, ranks, attempt, how, shared_tmp_path, tmp_path):
        print(f"rank {rank} attempt {attempt}")
        (shared_tmp_path / f"{rank}-{attempt}").write_text(str(os.getpid()))
        if rank == 1:
            if attempt == 0 and how == "killed":
                while not (shared_tmp_path / "seen").exists():
                    time.sleep(0.05)
                ranks.kill(1)
            while attempt == 0:
                if how == "itself" and (shared_tmp_path / "seen").exists():
                    ranks.restart(1)
                time.sleep(0.05)
            return
        old = ranks.pids[1]
        if how == "killed":
            ranks.expect_death(1)
        (shared_tmp_path / "seen").touch()
        if how == "killed":
            while not (shared_tmp_path / "1-0").exists() or os.path.exists(f"/proc/{old}/fd/0"):
                time.sleep(0.05)
        if how != "itself":
            ranks.restart(1)
        new = shared_tmp_path / "1-1"
        while not (new.exists() and new.read_text()):  # it is there before it has its text
            time.sleep(0.05)
        assert ranks.pids[1] == int(new.read_text()) != old

    @pytest.mark.distributed(workers=2)
    def test_next(rank, attempt):
        assert attempt == 0

    @pytest.mark.distributed(workers=2, may_die=(1,), timeout=40)
    def test_report_of_the_new_process_counts(rank, ranks, attempt):
        if rank == 0:
            ranks.restart(1)
        elif attempt == 0:
            time.sleep(30)
        else:
            print("noise of the second attempt")
            assert False, "second attempt"
    """
    )
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed*", "E*second attempt*", "*noise of the second attempt*"])


def test_restart_of_no_rank(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
    import pytest

    @pytest.mark.distributed(workers=2)
    def test_it(ranks):
        with pytest.raises(ValueError, match="ranks 0 to 1"):
            ranks.restart(2)
    """
    )
    result.assert_outcomes(passed=1)


def test_workers_of_xdist_have_ranks_of_their_own(inner: InnerPytest) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    result = inner.run(
        "-p",
        "xdist",
        "-n",
        "2",
        "--dist=each",
        source="""
    import os

    import pytest

    @pytest.mark.distributed(workers=2)
    @pytest.mark.parametrize("number", range(3))
    def test_it(rank, world_size, number, shared_tmp_path, tmp_path):
        (shared_tmp_path / str(rank)).touch(exist_ok=False)
        with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as stream:
            stream.write(f"{os.getpid()}\\n")

    @pytest.mark.distributed(workers=2)
    def test_fails(rank):
        assert rank == 0, "only rank 1"
    """,
    )
    result.assert_outcomes(passed=6, failed=2)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed*", "E*only rank 1*"])
    assert len(set(inner.lines("pids"))) == 4
