"""Tools for testing multi-process programs with pytest.

The pytest plugin is `tfstyle_dist.testing.plugin`; it is loaded through the entry point group `pytest11`.
This package imports nothing when it is imported, because pytest imports the plugin in every session of an
environment in which it is installed.
"""

from __future__ import annotations
