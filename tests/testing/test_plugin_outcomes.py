"""How the outcomes of the ranks become the outcome of the test."""

from __future__ import annotations

import pytest
from inner_pytest import InnerPytest


def test_marker_selects_how_often_the_body_runs(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import os
        from pathlib import Path

        import pytest

        def note(text):
            with open(Path(__file__).parent / "notes", "a") as stream:
                stream.write(text + "\\n")

        @pytest.mark.distributed(workers=3, deadline=7, env={"EXTRA": "yes", "HOME": None})
        def test_ranks(rank, world_size):
            assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
            assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == str(world_size) == "3"
            assert os.environ["TFSTYLE_TIMEOUT_SECONDS"] == "7"
            assert os.environ["OMP_NUM_THREADS"] == "1"
            assert os.environ["EXTRA"] == "yes"
            assert "HOME" not in os.environ
            note(f"rank {rank}")

        @pytest.mark.distributed
        def test_default_world(world_size):
            assert world_size == 2
            assert "EXTRA" not in os.environ
            assert "HOME" in os.environ
            assert os.environ["TFSTYLE_TIMEOUT_SECONDS"] == "20"

        def test_ordinary():
            assert "RANK" not in os.environ
            note(f"ordinary {os.getpid()}")
        """,
    )
    result.assert_outcomes(passed=3)
    notes = (inner.path / "notes").read_text().splitlines()
    assert sorted(notes[:3]) == ["rank 0", "rank 1", "rank 2"]
    assert len(notes) == 4


def test_a_wait_in_vain_names_the_option(inner: InnerPytest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own text, such as "wait timeout after 1000ms", says nothing of it."""
    monkeypatch.setenv("COLUMNS", "400")
    result = inner.run(
        source="""
        import time

        import pytest

        @pytest.mark.distributed(workers=2, deadline=1)
        def test_late(rank, request):
            if rank == 0:
                request.getfixturevalue("process_group")

        @pytest.mark.distributed(workers=1)
        def test_other():
            raise KeyError("no wait")
        """,
    )
    result.assert_outcomes(failed=2)
    about = [line for line in result.outlines if "distributed_deadline" in line]
    assert len(about) == 1
    assert "deadline= of @pytest.mark.distributed" in about[0]


def test_failures_of_all_ranks_are_shown_in_their_order(inner: InnerPytest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = inner.run(
        source="""
        import time

        import pytest

        @pytest.mark.distributed(workers=3)
        def test_two_fail(rank, shared_tmp_path):
            print(f"printed by {rank}")
            if rank == 2:
                (shared_tmp_path / "failed").touch()
                raise KeyError("came first")
            if rank == 0:
                while not (shared_tmp_path / "failed").exists():
                    time.sleep(0.01)
                # Its report says when it failed; the other rank needs a moment from the file to the error.
                time.sleep(0.5)
                raise LookupError("came second")
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*= rank 2 of 3 failed =*",
            "*raise KeyError*",
            "E*KeyError: 'came first'",
            "*= rank 0 of 3 failed =*",
            "E*LookupError: came second",
            "rank 1: passed",
            "*Captured stdout of rank 0*",
            "printed by 0",
            "*Captured stdout of rank 1*",
            "printed by 1",
            "*Captured stdout of rank 2*",
            "printed by 2",
            "FAILED *::test_two_fail - rank 2: KeyError: 'came first'",
        ]
    )


def test_setup_and_teardown_errors_of_a_rank_fail_the_test(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import pytest

        @pytest.fixture
        def broken(rank):
            if rank == 1:
                raise OSError("no setup")

        @pytest.fixture
        def careless(rank):
            yield
            assert rank != 0, "no teardown"

        @pytest.mark.distributed
        def test_setup(broken):
            pass

        @pytest.mark.distributed
        def test_teardown(careless):
            pass
        """,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*= rank 1 of 2 failed at setup =*", "E*OSError: no setup", "*= rank 0 of 2 failed at teardown =*"]
    )


def test_nccl_without_gpus_skips(inner: InnerPytest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = inner.run(
        "-rs",
        source="""
        import pytest

        @pytest.mark.distributed(workers=2, backend="nccl")
        def test_sum(process_group):
            raise AssertionError("must not run")
        """,
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *: backend 'nccl' needs 2 CUDA devices, this machine has 0"])


def test_skip_reaches_the_session(inner: InnerPytest) -> None:
    result = inner.run(
        "-rs",
        source="""
        import pytest

        @pytest.mark.distributed
        def test_one_rank(rank):
            if rank == 1:
                pytest.skip("rank one is lazy")

        @pytest.mark.distributed
        def test_all_ranks():
            pytest.skip("all are lazy")

        @pytest.mark.distributed
        @pytest.mark.skipif(True, reason="marked")
        def test_marked():
            raise AssertionError("must not run")

        @pytest.mark.distributed
        def test_skip_does_not_hide_a_failure(rank):
            if rank == 0:
                pytest.skip("only me")
            raise AssertionError("seen")
        """,
    )
    result.assert_outcomes(skipped=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: seen",
            "rank 0: skipped (Skipped: only me)",
            "SKIPPED *: rank one is lazy (rank 1)",
            "SKIPPED *: all are lazy",
            "SKIPPED *: marked",
        ]
    )


def test_xfail_is_judged_over_all_ranks(inner: InnerPytest) -> None:
    result = inner.run(
        "-rxX",
        source="""
        import pytest

        @pytest.mark.distributed
        @pytest.mark.xfail(strict=True, raises=ValueError, reason="one rank is enough")
        def test_one_rank_fails(rank):
            if rank == 1:
                raise ValueError("as expected")

        @pytest.mark.distributed
        @pytest.mark.xfail(raises=ValueError)
        def test_wrong_exception(rank):
            raise KeyError("unexpected")

        @pytest.mark.distributed
        @pytest.mark.xfail(strict=True, reason="should fail")
        def test_strict():
            pass

        @pytest.mark.distributed
        @pytest.mark.xfail(strict=False)
        def test_lenient():
            pass

        @pytest.mark.distributed
        @pytest.mark.xfail(strict=True, reason="dies")
        def test_death(rank, ranks):
            if rank == 1:
                ranks.kill(1)
        """,
    )
    result.assert_outcomes(xfailed=2, xpassed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*KeyError: 'unexpected'",
            "*XPASS(strict)*should fail*",
            "XFAIL *::test_one_rank_fails - one rank is enough",
        ]
    )


def test_wrong_markers_are_refused(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import unittest

        import pytest

        @pytest.mark.distributed(2)
        def test_positional(): pass

        @pytest.mark.distributed(worker=2)
        def test_misspelled(): pass

        @pytest.mark.distributed(backend="carrier pigeon")
        def test_backend(): pass

        @pytest.mark.distributed(workers=0)
        def test_nobody(): pass

        @pytest.mark.distributed(timeout=10, deadline=10)
        def test_ladder(): pass

        @pytest.mark.distributed(may_die=(2,))
        def test_no_such_rank(): pass

        class TestOld(unittest.TestCase):
            @pytest.mark.distributed
            def test_unittest(self): pass

        def test_no_marker(rank): pass
        """,
    )
    result.assert_outcomes(errors=8)
    result.stdout.fnmatch_lines(
        [
            "*positional arguments (2,); name them*",
            "*unknown arguments ?'worker'?; it knows workers, replicas,*",
            "*backend='carrier pigeon'; write one of gloo, nccl*",
            "*workers=0; write at least 1*",
            "*deadline=10 and timeout=10; a process group must give up before*",
            "*may_die=(2,) with workers=2; write ranks from 0 to 1*",
            "*unittest.TestCase TestOld; write the test as a function*",
            "*'rank' was requested by a test that does not run on ranks; write @pytest.mark.distributed*",
        ]
    )


def test_failed_import_in_a_rank_is_reported(inner: InnerPytest) -> None:
    result = inner.run(
        source="""
        import os

        import pytest

        if os.environ.get("TFSTYLE_TESTING_RANK") == "1":
            raise ImportError("only in rank one")

        @pytest.mark.distributed
        def test_imports():
            pass

        def test_next():
            pass
        """,
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 could not collect the test*", "*ImportError: only in rank one*"])
