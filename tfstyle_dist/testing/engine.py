"""Running one marked test of a pytest session on its ranks."""

from __future__ import annotations

import unittest
from collections.abc import Generator

import pytest

from tfstyle_dist.testing import options as marker_options
from tfstyle_dist.testing.pool import RankPool
from tfstyle_dist.testing.reports import DistributedFailure, Merged, merge

_POOL = pytest.StashKey[RankPool]()
_MERGED = pytest.StashKey[Merged]()


def options_of(item: pytest.Item) -> marker_options.DistributedOptions:
    """Returns the checked marker of a marked test.

    Raises:
        pytest.fail.Exception: If the marker is wrong or cannot work on this kind of test.
    """
    mark = item.get_closest_marker(marker_options.MARKER)
    assert mark is not None, item.nodeid
    cls = getattr(item, "cls", None)
    if cls is not None and issubclass(cls, unittest.TestCase):
        pytest.fail(
            f"@pytest.mark.{marker_options.MARKER} got a method of the unittest.TestCase {cls.__name__}; "
            "write the test as a function or in a class without that base",
            pytrace=False,
        )
    config = item.config
    try:
        return marker_options.options_from_mark(
            mark,
            timeout=float(config.getini("distributed_timeout")),
            deadline=float(config.getini("distributed_deadline")),
        )
    except (TypeError, ValueError) as error:
        pytest.fail(str(error), pytrace=False)


def run_item(item: pytest.Function) -> None:
    """Runs a marked test on its ranks and leaves the outcome for `apply_outcome`.

    Args:
        item: The test.

    Raises:
        DistributedFailure: If a rank died, hung or could not begin, or if the test failed on a rank.
        pytest.skip.Exception: If the test was skipped.
        pytest.xfail.Exception: If it failed as expected.
    """
    options = options_of(item)
    pool = _pool(item.config)
    results = pool.run(item, options)
    if item.config.getoption("fresh_ranks"):
        pool.close()
    merged = merge(item, results, options.timeout)
    item.stash[_MERGED] = merged
    # The report is made from what the ranks say, but the hooks of the session look at the exception too.
    if merged.outcome == "failed" and not merged.xpassed:
        raise DistributedFailure(str(merged.longrepr))
    if merged.outcome == "skipped":
        # pytest puts these words before the reason that the exception gives.
        if merged.wasxfail is not None:
            raise pytest.xfail.Exception(merged.wasxfail.removeprefix("reason: "))
        raise pytest.skip.Exception(merged.reason.removeprefix("Skipped: "))


def apply_outcome(item: pytest.Item, report: pytest.TestReport) -> None:
    """Puts the outcome of the ranks into the report of a test that ran on ranks.

    Args:
        item: The test.
        report: The report of its call phase as pytest made it, which is changed in place.
    """
    merged = item.stash.get(_MERGED, None)
    if merged is None:
        return
    del item.stash[_MERGED]
    report.sections.extend(merged.sections)
    new = [pair for pair in merged.user_properties if pair not in item.user_properties]
    item.user_properties.extend(new)
    report.user_properties.extend(new)
    if merged.broken:
        # pytest has judged the exception, and knows whether it was expected.
        if report.failed:
            report.longrepr = merged.longrepr
        return
    report.outcome = merged.outcome  # type: ignore[assignment]
    report.longrepr = merged.longrepr
    if merged.wasxfail is not None:
        report.wasxfail = merged.wasxfail
    elif hasattr(report, "wasxfail"):
        del report.wasxfail


def _pool(config: pytest.Config) -> RankPool:
    pool = config.stash.get(_POOL, None)
    if pool is None:
        pool = config.stash[_POOL] = RankPool(config)
        config.add_cleanup(pool.close)
        config.pluginmanager.register(_Closing(pool))
    return pool


class _Closing:
    """Ends the ranks before the session ends, whose own files are to be the last that are written."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        self._pool.close()
        yield
