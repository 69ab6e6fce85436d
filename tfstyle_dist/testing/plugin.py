"""The pytest plugin: `@pytest.mark.distributed` runs a test in several rank processes.

Only hooks and options are here; what they need is imported when the first marked test runs.

Example:
    >>> @pytest.mark.distributed(workers=2, timeout=60, deadline=20)
    ... def test_all_reduce(rank, world_size, tmp_path, shared_tmp_path):
    ...     assert world_size == 2
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest

from tfstyle_dist.testing.messages import RANK_PLUGIN_NAME
from tfstyle_dist.testing.options import MARKER

pytest_plugins = ("tfstyle_dist.testing.fixtures",)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the plugin."""
    group = parser.getgroup("tfstyle_dist", "multi-process tests")
    group.addoption(
        "--fresh-ranks",
        action="store_true",
        dest="fresh_ranks",
        default=False,
        help="start new rank processes for every distributed test instead of reusing them",
    )
    parser.addini(
        "distributed_timeout",
        default="60",
        help="seconds that a distributed test may take, unless its marker says otherwise",
    )
    parser.addini(
        "distributed_deadline",
        default="20",
        help="seconds that a process group waits for its peers (TFSTYLE_TIMEOUT_SECONDS in the ranks), "
        "unless the marker says otherwise",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(workers=2, replicas=1, backend='gloo', timeout=60, deadline=20, devices=None, env=None, "
        "may_die=()): run the test in `workers` rank processes",
    )


def _runs_on_ranks(item: pytest.Item) -> bool:
    """Returns whether this process must send the test to ranks; false in the ranks themselves."""
    marked = item.get_closest_marker(MARKER) is not None
    return marked and not item.config.pluginmanager.has_plugin(RANK_PLUGIN_NAME)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Has the ranks run a marked test, for which they also keep its fixtures."""
    if not (_runs_on_ranks(item) and isinstance(item, pytest.Function)):
        return (yield)
    from tfstyle_dist.testing import engine

    names = item.fixturenames
    item.fixturenames = []
    # Not a hook: another plugin's hook, such as one for coroutines, might come first and call the body here.
    item.runtest = partial(engine.run_item, item)  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        item.fixturenames = names
        del item.runtest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reports a wrong marker before any process is started for it."""
    if _runs_on_ranks(item):
        from tfstyle_dist.testing import engine

        engine.options_of(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replaces the outcome of a marked test by that of its ranks."""
    report = yield
    if call.when == "call" and _runs_on_ranks(item):
        from tfstyle_dist.testing import engine

        engine.apply_outcome(item, report)
    return report
