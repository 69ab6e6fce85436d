"""What a rank has of the session's world: options, variables, the interpreter; and which tests it runs of a file."""

from __future__ import annotations

import sys

import pytest
from inner_pytest import PLUGIN, InnerPytest


def test_options_and_variables_are_there_from_the_import_on(
    inner: InnerPytest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_DATA_DIR", "GROUP_NAME", "MASTER_KEY", "MASTER_PORT", "SLURM_JOB_ID", "ROLE_RANK"):
        monkeypatch.setenv(name, "outside")
    inner.pytester.makeconftest(
        """
        import enum

        class Mode(enum.Enum):
            FAST = "fast"
            EXACT = "exact"

        def pytest_addoption(parser):
            parser.addoption("--mode", type=Mode, default=Mode.FAST)
            parser.addoption("--unusable", default=lambda: None)
        """
    )
    inner.pytester.makepyfile(
        """
        import os
        import warnings

        import pytest
        from conftest import Mode

        pytestmark = pytest.mark.distributed
        AT_IMPORT = [os.environ.get(name) for name in ("RANK", "LOCAL_WORLD_SIZE", "COLOR")]

        @pytest.mark.distributed(env={"COLOR": "green"})
        def test_import(rank):
            assert AT_IMPORT == [str(rank), "2", "green"]

        def test_what_was_set_for_the_import_is_not_kept():
            assert "COLOR" not in os.environ

        def test_option(pytestconfig):
            assert pytestconfig.getoption("--mode") is Mode.EXACT

        def test_interpreter():
            if __debug__:
                raise ValueError("-O is lost")

        def test_warnings():
            with pytest.raises(DeprecationWarning):
                warnings.warn("old", DeprecationWarning)

        def test_variables(rank):
            assert [os.environ.get(name) for name in ("LOCAL_DATA_DIR", "GROUP_NAME", "MASTER_KEY")] == ["outside"] * 3
            assert not {"MASTER_PORT", "SLURM_JOB_ID", "ROLE_RANK"} & os.environ.keys()
        """
    )
    flags = ["-O", "-W", "error::DeprecationWarning"]
    result = inner.pytester.run(sys.executable, *flags, "-m", "pytest", "-p", PLUGIN, "--mode=exact")
    result.assert_outcomes(passed=6, warnings=result.parseoutcomes().get("warnings", 0))


def test_the_session_alone_selects(inner: InnerPytest) -> None:
    """A conftest that looks at -m sees it, and one that takes a share of all tests may leave out another one here."""
    inner.pytester.makeini("[pytest]\nmarkers = slow: takes long\n")
    inner.pytester.makeconftest(
        """
        import pytest

        def pytest_collection_modifyitems(config, items):
            if config.getoption("-m") != "slow":
                for item in items:
                    item.add_marker(pytest.mark.skip(reason="use -m slow"))
            items[:] = items[1::2]
        """
    )
    source = "import pytest\npytestmark = [pytest.mark.slow, pytest.mark.distributed(workers=1)]\n"
    tests = [f"def test_{number}(): pass\n" for number in range(3)]
    inner.pytester.makepyfile(test_a="".join([source, *tests]), test_b="".join([source, *tests[:2]]))
    result = inner.run("-m", "slow", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["test_a.py::test_1 PASSED*", "test_b.py::test_0 PASSED*"])


def test_worker_of_xdist(inner: InnerPytest) -> None:
    pytest.importorskip("xdist")
    result = inner.run(
        "-p",
        "xdist",
        "-n",
        "1",
        source="""
        import pytest

        @pytest.mark.distributed(workers=1)
        def test_worker(worker_id, pytestconfig):
            assert worker_id == "gw0"
            assert pytestconfig.workeroutput == {}
        """,
    )
    result.assert_outcomes(passed=1)
