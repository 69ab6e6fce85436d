"""An inner pytest session that has the plugin."""

from __future__ import annotations

import pytest

PLUGIN = "tfstyle_dist.testing.plugin"


class InnerPytest:
    """Runs pytest in a process of its own, on files of a temporary directory.

    Attributes:
        pytester: The fixture that makes the files.
        path: The root directory.
    """

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path

    def run(self, *args: str, source: str | None = None) -> pytest.RunResult:
        """Runs the session, if a source is given after having written it into a test file."""
        if source is not None:
            self.pytester.makepyfile(source)
        return self.pytester.runpytest_subprocess("-p", PLUGIN, *args)

    def lines(self, name: str) -> list[str]:
        """Returns the lines that the inner tests wrote into a file of the root directory."""
        return (self.path / name).read_text().splitlines()
