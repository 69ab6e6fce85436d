"""A rank's own pytest session over one test file."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.testing import messages
from tfstyle_dist.testing.ranks import Ranks
from tfstyle_dist.testing.reset import RankState
from tfstyle_dist.testing.session_options import as_plain, is_collection, is_plain


class RankSession:
    """The pytest plugin that turns a session into a server of the single tests of one file.

    A file is collected once, and its tests run in one session; another file gets a new session in the same
    process, because pytest connects a conftest's fixtures to what it collects only once per session.

    Args:
        connection: The pipe to the parent.
        request: The request that made the session necessary.

    Attributes:
        began: Whether the file was collected, with or without success.
        next_message: What the parent sent that is not for this session.
        assignment: The running test, or None.
    """

    def __init__(self, connection: Connection[Any, Any], request: messages.Collect) -> None:
        self.began = False
        self.next_message: messages.Collect | messages.Exit | None = None
        self.assignment: messages.Run | None = None
        self._connection = connection
        self._lock = threading.Lock()
        self._request = request
        self._environment_before: dict[str, str | None] = {}
        self._collected: list[pytest.Item] = []
        self._items: dict[str, pytest.Item] = {}
        self._collect_problems: list[str] = []
        self._reports: list[dict[str, Any]] = []
        self._state: RankState | None = None
        self._config: pytest.Config | None = None
        self._unfit: str | None = None

    def run(self, start: messages.Start) -> None:
        """Runs the session until the parent wants something else.

        Args:
            start: How to build the session.
        """
        self._environment_before = _set_environment(self._request.env)
        config = pytest.Config.fromdictargs(dict(start.options), list(start.args))
        for name, value in start.pickled.items():
            # What a plugin keeps for itself may be readable in its own process only.
            with contextlib.suppress(Exception):
                setattr(config.option, name, pickle.loads(value))
        if start.worker is not None:
            # The names by which plugins, and the fixture `worker_id`, know a worker of pytest-xdist.
            vars(config).update(workerinput=dict(start.worker), workeroutput={})
        config.pluginmanager.register(self, messages.RANK_PLUGIN_NAME)
        config.hook.pytest_cmdline_main(config=config)

    @property
    def ranks(self) -> Ranks:
        """The handle with which the running test reaches its ranks' processes."""
        assert self.assignment is not None, "only a running test has ranks"
        return Ranks(self.assignment.pids_path, self._send)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Drops the plugins that would write the parent's cache."""
        self._config = config
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Collects the requested file instead of what the parent's command line names."""
        path = Path(self._request.path)
        # pytest takes what follows a bracket for the id of a parameter, so the folder above it is collected.
        above = [folder for folder in path.parents if "[" not in str(folder)]
        session.config.args[:] = [str(above[0] if "[" in str(path) else path)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Keeps out what lies beside the requested file, where a folder above it is collected."""
        path = Path(self._request.path)
        wanted = "[" not in self._request.path or collection_path == path or collection_path in path.parents
        return None if wanted else True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remembers why the file could not be collected."""
        if report.failed:
            self._collect_problems.append(str(report.longrepr))

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remembers every test, because the session has selected already: a rank that selects may lose some."""
        self._collected.append(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skips a test that needs more devices than there are."""
        needed = self.assignment.devices if self.assignment is not None else None
        if needed is None:
            return
        import torch

        present = torch.cuda.device_count()
        if present < needed:
            pytest.skip(f"needs {needed} CUDA devices, this machine has {present}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answers the parent's messages as long as they are about this file."""
        self._items = {item.nodeid: item for item in (*self._collected, *session.items)}
        _set_environment(self._environment_before)
        self.began = True
        message: object = self._request
        while True:
            if isinstance(message, messages.Collect) and message.path == self._request.path:
                self._send(messages.Ready(self._collection_problem(message)))
            elif isinstance(message, messages.Run):
                self._send(self._run(session.config, message))
            elif isinstance(message, messages.Reset):
                self._send(messages.Ready(self._reset(session)))
            else:
                assert isinstance(message, (messages.Collect, messages.Exit)), message
                self.next_message = message
                return True
            message = self._connection.recv()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Remembers that an error came out of torch.distributed."""
        # Once Gloo has failed to connect, no group of the process can be made any more: each waits in vain.
        if call.excinfo is not None and _came_out_of(call.excinfo.value, "torch.distributed"):
            self._unfit = "an error of torch.distributed, which may have left its threads unusable"

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps a report for the parent."""
        assert self._config is not None
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        # Hooks hang on a report what they like, such as the test itself, and that is for this process only.
        plain = {name: as_plain(value) for name, value in data.items() if is_plain(value) or is_collection(value)}
        self._reports.append(plain)

    def _send(self, message: object) -> None:
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                # The parent is gone, and with it everybody who wants to know.
                os._exit(1)

    def _collection_problem(self, message: messages.Collect) -> str | None:
        if self._collect_problems:
            return "\n".join(self._collect_problems)
        if message.nodeid in self._items:
            return None
        return (
            f"the rank process did not find {message.nodeid} in {message.path}, although the session did; "
            "the names of tests and the ids of their parameters must be the same in every process"
        )

    def _run(self, config: pytest.Config, message: messages.Run) -> messages.Finished:
        self._reports = []
        self.assignment = message
        self._state = RankState.now()
        _set_environment(message.env)
        item = self._items[message.nodeid]
        protocol = config.pluginmanager.subset_hook_caller("pytest_runtest_protocol", _other_runners(config))
        # Without a next item every fixture is torn down, so that no test sees the world of another.
        crash = problem_of(lambda: protocol(item=item, nextitem=None))
        if any(report["outcome"] == "failed" for report in self._reports):
            # Lets peers that wait for this rank in a collective see a closed connection instead of a timeout.
            crash = problem_of(self._state.close_groups) or crash
        return messages.Finished(self._reports, crash)

    def _reset(self, session: pytest.Session) -> str | None:
        assert self._state is not None, "a reset follows a run"
        self.assignment = None
        session.shouldstop = session.shouldfail = False
        state, self._state = self._state, None
        unfit, self._unfit = self._unfit, None
        problems = [unfit] if unfit is not None else []
        crash = problem_of(lambda: problems.extend(state.restore()))
        return crash or ("; ".join(problems) or None)


def _set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets variables, or with None removes them; returns what they were."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _other_runners(config: pytest.Config) -> list[object]:
    """The plugins that run a test in a way of their own, such as once more after a failure.

    They do so in the session, where all ranks take part; a rank alone would wait for its peers in vain.
    """
    return [
        implementation.plugin
        for implementation in config.hook.pytest_runtest_protocol.get_hookimpls()
        if not (implementation.hookwrapper or implementation.wrapper)
        and not implementation.function.__module__.startswith("_pytest.")
    ]


def _came_out_of(error: BaseException | None, package: str) -> bool:
    """Says whether an error, or one that it was raised from, passed through a function of a package."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if f"{frame.f_globals.get('__name__')}.".startswith(f"{package}."):
                return True
        error = error.__cause__ or error.__context__
    return False


def problem_of(action: Callable[[], object]) -> str | None:
    """Returns the traceback of anything that escapes, `pytest.exit` and Ctrl-C included."""
    try:
        action()
    except BaseException:
        return traceback.format_exc()
    return None
