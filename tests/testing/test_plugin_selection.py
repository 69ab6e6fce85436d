"""Fixtures, parameters, classes and command line options of marked tests."""

from __future__ import annotations

from inner_pytest import InnerPytest


def test_fixtures_and_parameters_work_in_the_ranks(inner: InnerPytest) -> None:
    inner.pytester.makeconftest(
        """
        import os

        import pytest

        def pytest_addoption(parser):
            parser.addoption("--color-of-day")

        @pytest.fixture
        def color(request):
            return request.config.getoption("--color-of-day")

        @pytest.fixture(scope="session", autouse=True)
        def only_ranks():
            # The session itself must not build the fixtures of a test that it does not run.
            assert "RANK" in os.environ
        """
    )
    result = inner.run(
        "--color-of-day=green",
        source="""
        import os

        import pytest

        pytestmark = pytest.mark.distributed(workers=2)

        @pytest.fixture(params=["a", "b"])
        def letter(request):
            return request.param

        @pytest.mark.parametrize("number", [1, pytest.param(2, id="two")])
        def test_all(rank, world_size, letter, number, color, tmp_path, shared_tmp_path, monkeypatch, capsys):
            assert color == "green"
            (tmp_path / "own").touch(exist_ok=False)
            (shared_tmp_path / f"{rank}").touch(exist_ok=False)
            monkeypatch.setenv("SEEN", letter)
            print("hello")
            assert capsys.readouterr().out == "hello\\n"
            with open(os.path.join(os.path.dirname(__file__), f"notes-{rank}"), "a") as stream:
                print(letter, number, tmp_path, shared_tmp_path, sep="|", file=stream)

        class TestMethods:
            def setup_method(self):
                self.ready = True

            def test_one(self, rank):
                assert self.ready

            @pytest.mark.distributed(workers=1)
            def test_alone(self, world_size):
                assert world_size == 1
        """,
    )
    result.assert_outcomes(passed=6)
    first, second = ([line.split("|") for line in inner.lines(f"notes-{rank}")] for rank in (0, 1))
    assert {(letter, number) for letter, number, _, _ in first} == {(x, y) for x in "ab" for y in "12"}
    assert [row[3] for row in first] == [row[3] for row in second]
    assert len({row[3] for row in first}) == 4
    assert len({row[2] for row in [*first, *second]}) == 8


def test_selection_and_stopping(inner: InnerPytest) -> None:
    inner.pytester.makepyfile(
        test_alone="def test_wrong():\n    assert False\n",
        test_it="""
        import pytest

        pytestmark = pytest.mark.distributed(workers=1)

        def test_good():
            pass

        def test_bad():
            assert False, "always"

        def test_later():
            pass
        """,
    )
    inner.run("-x", "test_it.py").assert_outcomes(passed=1, failed=1)
    inner.run().assert_outcomes(passed=2, failed=2)
    # The ranks, which end last, must not have written their own idea of what failed.
    inner.run("--lf").assert_outcomes(failed=2)
    inner.run("-k", "later or good", "-p", "no:cacheprovider").assert_outcomes(passed=2, deselected=2)
    result = inner.run("-v", "test_it.py::test_later", "--junitxml=out.xml")
    result.assert_outcomes(passed=1)
    assert 'tests="1"' in (inner.path / "out.xml").read_text()


def test_ranks_start_as_the_session_did(inner: InnerPytest) -> None:
    inner.pytester.makeini(
        """
        [pytest]
        addopts = --strict-markers -ra
        filterwarnings = error
        pythonpath = lib
        distributed_deadline = 3
        distributed_timeout = 50
        xfail_strict = true
        """
    )
    library = inner.pytester.mkdir("lib")
    (library / "helper_module.py").write_text("VALUE = 5\n")
    folder = inner.pytester.mkdir("sub")
    (folder / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef near():\n    return 'near'\n")
    (folder / "test_more.py").write_text(
        "import pytest\n@pytest.mark.distributed\ndef test_other_file(near):\n    assert near == 'near'\n"
    )
    (folder / "test_sub.py").write_text(
        """
import os
import sys
import warnings
from pathlib import Path

import helper_module
import pytest

CWD = os.getcwd()

@pytest.mark.distributed
def test_same_world(near, pytestconfig):
    assert near == "near"
    assert helper_module.VALUE == 5
    assert pytestconfig.rootpath == Path(__file__).parent.parent
    assert CWD == str(pytestconfig.rootpath)
    assert os.environ["TFSTYLE_TIMEOUT_SECONDS"] == "3"
    os.chdir("/")
    os.environ["LEFT_BEHIND"] = "1"
    with pytest.raises(UserWarning):
        warnings.warn("an error here")

@pytest.mark.distributed
def test_restored():
    assert os.getcwd() == CWD
    assert "LEFT_BEHIND" not in os.environ
"""
    )
    inner.run("sub").assert_outcomes(passed=3)
