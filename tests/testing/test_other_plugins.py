"""Hooks of other plugins and of conftest files, in the session and in the ranks."""

from __future__ import annotations

import json

import pytest
from inner_pytest import InnerPytest


def test_other_ways_to_run_a_test_leave_it_to_all_ranks(inner: InnerPytest) -> None:
    """Such as for coroutines, and once more after a failure."""
    inner.pytester.makeconftest(
        """
        import asyncio
        import inspect

        import pytest
        from _pytest.runner import runtestprotocol

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            if inspect.iscoroutinefunction(pyfuncitem.obj):
                asyncio.run(pyfuncitem.obj())
                return True

        def pytest_runtest_protocol(item, nextitem):
            for attempt in range(2):
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
                if not any(report.failed for report in reports):
                    break
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
            return True
        """
    )
    result = inner.run(
        source="""
        import os
        from pathlib import Path

        import pytest

        @pytest.mark.distributed
        async def test_coroutine():
            assert os.environ["RANK"] != "1", "seen"

        @pytest.mark.distributed
        def test_flaky(rank):
            with open(Path(__file__).with_name(f"turns-{rank}"), "a") as stream:
                stream.write("turn\\n")
            if rank == 0:
                assert len(Path(stream.name).read_text().splitlines()) == 2
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*AssertionError: seen"])
    assert [len(inner.lines(f"turns-{rank}")) for rank in (0, 1)] == [2, 2]


_WATCHING_CONFTEST = """
import json
import os

import pytest

SEEN = {}

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.item = item
    if report.when == "call":
        error = None if call.excinfo is None else call.excinfo.typename
        SEEN[item.name] = [report.outcome, error]
        item.call_report = report
    return report

def pytest_sessionfinish(session):
    with open(session.config.rootpath / "seen.json", "w") as stream:
        json.dump(SEEN, stream)

@pytest.fixture
def watched(request):
    yield
    assert request.node.call_report.failed == (os.environ["RANK"] == "1")
"""

_WATCHED = """
import pytest

pytestmark = pytest.mark.distributed

class Unpicklable:
    def __reduce__(self):
        raise TypeError("no")

    def __str__(self):
        return "as text"

def test_fails(watched, rank):
    assert rank == 0, "one failed"

def test_passes(record_property, rank):
    record_property("loss", 0.5)
    record_property("rank", rank)
    record_property("object", Unpicklable())

def test_skips(rank):
    if rank == 1:
        pytest.skip("lazy")

@pytest.mark.xfail(raises=KeyError)
def test_fails_as_expected():
    raise KeyError

@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly():
    pass

def test_dies(rank, ranks):
    ranks.kill(1)
"""


def test_hooks_of_the_session_see_the_outcome_and_have_the_last_word(inner: InnerPytest) -> None:
    inner.pytester.makeconftest(_WATCHING_CONFTEST)
    result = inner.run("--tb=line", "--junitxml=out.xml", source=_WATCHED)
    result.assert_outcomes(passed=1, failed=3, skipped=1, xfailed=1)
    assert json.loads((inner.path / "seen.json").read_text()) == {
        "test_fails": ["failed", "DistributedFailure"],
        "test_passes": ["passed", None],
        "test_skips": ["skipped", "Skipped"],
        "test_fails_as_expected": ["skipped", "XFailed"],
        "test_passes_unexpectedly": ["failed", None],
        "test_dies": ["failed", "DistributedFailure"],
    }
    document = (inner.path / "out.xml").read_text()
    recorded = [("loss", "0.5"), ("rank", "0"), ("rank", "1"), ("object", "as text")]
    assert [document.count(f'<property name="{name}" value="{value}"') for name, value in recorded] == [1] * 4
    result.stdout.fnmatch_lines(["*.py:13: rank 1: AssertionError: one failed", "*.py:32: rank 1 of 2 died with *"])


def test_a_skipped_subtest_skips_no_test(inner: InnerPytest) -> None:
    pytest.importorskip("_pytest.subtests")
    result = inner.run(
        "-rA",
        source="""
        import pytest

        pytestmark = pytest.mark.distributed

        def test_skip(subtests):
            with subtests.test():
                pytest.skip("one of several")

        def test_xfail(subtests):
            with subtests.test():
                pytest.xfail("one of several")

        def test_failure(subtests):
            with subtests.test(number=lambda: 1):
                assert False
        """,
    )
    result.stdout.fnmatch_lines(["PASSED *::test_skip", "PASSED *::test_xfail", "FAILED *::test_failure*"])


def test_hypothesis_draws_the_same_on_all_ranks(inner: InnerPytest) -> None:
    pytest.importorskip("hypothesis")
    result = inner.run(
        "-p",
        "_hypothesis_pytestplugin",
        source="""
        from pathlib import Path

        import pytest
        from hypothesis import HealthCheck, given, settings, strategies

        @pytest.mark.distributed
        @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(number=strategies.integers(0, 10**9))
        def test_draws(rank, number):
            with open(Path(__file__).with_name(f"drawn-{rank}"), "a") as stream:
                stream.write(f"{number}\\n")
        """,
    )
    result.assert_outcomes(passed=1)
    assert inner.lines("drawn-0") == inner.lines("drawn-1")
    assert len(inner.lines("drawn-0")) >= 20
