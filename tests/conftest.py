"""Fixtures for every test: each starts from, and must leave, the same state of torch and of the package."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_devices
import pytest
import torch
from example_runs import Player
from quick import is_quick

from tfstyle_dist.core import logging as logs
from tfstyle_dist.runtime import context
from tfstyle_dist.testing.messages import RANK_PLUGIN_NAME

SEES_GPUS = "TFSTYLE_TESTS_SEE_GPUS"
"""Set where tests of GPUs were asked for (``pytest -m gpu``)."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and processes of tests that are to be interrupted would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) or sys.dont_write_bytecode:
    # Every interpreter that a test starts would compile the package anew, and every session of ranks its tests.
    sys.dont_write_bytecode = False

if on_devices.NAMES:
    on_devices.load()
elif not ({"TFSTYLE_DEVICE_KIND", SEES_GPUS} & os.environ.keys()):
    # The tests are about the CPU; on a machine with a GPU a strategy without devices would take that.
    if any(re.search(r"(?<!not )\bgpu\b", argument) for argument in sys.argv[1:]):
        os.environ[SEES_GPUS] = "1"  # also for the sessions of pytest-xdist
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

DEFAULT_MARKERS = "not gpu and not xla"
"""As in pyproject.toml."""


def pytest_configure(config: pytest.Config) -> None:
    """Adds what the suites need where they run on devices."""
    if on_devices.NAMES:
        config.pluginmanager.register(on_devices)
    if os.environ.get("CI") and not _is_inner(config):
        config.pluginmanager.register(_ToldAtOnce(config))


def _is_inner(config: pytest.Config) -> bool:
    """Whether another session collects what this one reports: one of pytest-xdist, or of a rank."""
    return hasattr(config, "workerinput") or config.pluginmanager.has_plugin(RANK_PLUGIN_NAME)


class _ToldAtOnce:
    """In CI a failure is printed when it happens: a run that is ended from outside never comes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write(f"\n{report.nodeid} failed in its {report.when} after {report.duration:.0f} s\n")
            terminal.write("\n".join(report.longreprtext.splitlines()[-30:]) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--whole`` and ``--rest``."""
    parser.addoption("--whole", action="store_true", help="run all tests, not just the quick ones (tests/quick.py)")
    parser.addoption("--rest", action="store_true", help="run the tests that are not quick")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Chooses the quick tests, with ``--rest`` the others, with ``--whole`` all; runs them in two sessions.

    That is, where pytest-xdist is there: one session spends half of its time waiting. A command line that names files,
    or has ``-m``, ``-k``, ``-n`` or a debugger, is taken as it stands.
    """
    option = config.option
    names_nothing = config.args_source is pytest.Config.ArgsSource.TESTPATHS and option.markexpr == DEFAULT_MARKERS
    if not names_nothing or _is_inner(config) or option.keyword:
        return
    option.part = "whole" if option.whole else "rest" if option.rest else "quick"
    if option.usepdb or option.collectonly:
        return
    if getattr(option, "numprocesses", 0) is None and option.dist == "no":
        option.numprocesses, option.dist = 2, "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells the sessions of pytest-xdist which tests were asked for."""
    node.workerinput["part"] = getattr(node.config.option, "part", "whole")


def _part(config: pytest.Config) -> str:
    part: str = getattr(config, "workerinput", {}).get("part", getattr(config.option, "part", "whole"))
    return part


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import the files of which no test is quick where the quick ones were asked for."""
    ours = collection_path.suffix == ".py" and _part(config) == "quick"
    return True if ours and not is_quick(collection_path, slow=False) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what was not asked for: the quick tests, or all others."""
    part = _part(config)
    if part == "whole":
        return
    parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        parts[is_quick(item.path, item.get_closest_marker("slow") is not None)].append(item)
    items[:] = parts[part == "quick"]
    config.hook.pytest_deselected(items=parts[part != "quick"])


def pytest_collection_finish() -> None:
    """What was imported lives as long as the session: no collection looks at it again, as many tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restore_torch_state() -> Iterator[None]:
    """Seeds torch, and puts back what a test may have changed in it."""
    rng_state = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    num_threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(rng_state)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _no_leaked_strategy() -> Iterator[None]:
    """Fails a test that leaves a strategy scope or ``experimental_set_strategy`` behind."""
    yield
    leaked = []
    while (frame := context.current_frame()) is not None:
        leaked.append(type(frame.strategy).__name__)
        context.pop(frame)
        context.set_global_strategy(None)
    if leaked:
        pytest.fail(f"The test left {leaked} as the current strategy; leave its scope, or set None.")


@pytest.fixture
def nothing_said_yet(caplog: pytest.LogCaptureFixture) -> None:
    """What is said once is said again, and in ``caplog``."""
    logs._said.clear()
    caplog.set_level(logging.WARNING, "tfstyle_dist")


@pytest.fixture
def player(rank: int, world_size: int, shared_tmp_path: Path) -> Player:
    """Runs examples on the ranks of the test."""
    return Player(rank, world_size, shared_tmp_path)
