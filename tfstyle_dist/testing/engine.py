"""Running one marked test of a pytest session on its ranks."""

from __future__ import annotations

import unittest

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
        DistributedFailure: If a rank died, hung or could not begin. A failure of the test body raises nothing
            here, because whether it was expected is for the ranks to say.
    """
    options = options_of(item)
    pool = _pool(item.config)
    results = pool.run(item, options)
    if item.config.getoption("fresh_ranks"):
        pool.close()
    merged = merge(item.config, results, options.timeout)
    item.stash[_MERGED] = merged
    if merged.broken:
        raise DistributedFailure(str(merged.longrepr))


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
    return pool
