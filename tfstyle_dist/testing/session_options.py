"""Which options of the parent's pytest session a rank's own session takes over."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.testing.messages import Start

# What would make a rank select, stop, debug, write or distribute instead of running what it is told.
_RANK_VALUES: Mapping[str, Any] = {
    "cacheclear": False,
    "capture": "no",
    "collectonly": False,
    "debug": None,
    "deselect": None,
    "dist": "no",
    "durations": None,
    "failedfirst": False,
    "force_sugar": False,
    "htmlpath": None,
    "json_report": False,
    "lf": False,
    "log_file": os.devnull,
    "looponfail": False,
    "maxfail": 0,
    "maxprocesses": None,
    "newfirst": False,
    "no_cov": True,
    "numprocesses": None,
    "pastebin": None,
    "report_log": None,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "stepwise": False,
    "stepwise_skip": False,
    "timeout": 0,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}

# The plugin's own package is imported in a rank before pytest could rewrite its assertions; that is no problem of the
# session, whose filters may turn warnings into errors.
_NO_REWRITE_WARNING = ("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")


def start_message(config: pytest.Config, basetemp: Path, seed: int) -> Start:
    """Builds the message from which a rank builds a pytest session like the parent's.

    Args:
        config: The parent's configuration.
        basetemp: The rank's own base directory for `tmp_path`.
        seed: What Hypothesis draws from in all ranks of the session, unless its command line option says it.

    Returns:
        The message.
    """
    options = {name: value for name, value in vars(config.option).items() if is_plain(value)}
    options.update({name: value for name, value in _RANK_VALUES.items() if name in options})
    options.update(
        basetemp=str(basetemp),
        # A rank's terminal output is read by nobody.
        plugins=["no:terminal"],
        rootdir=str(config.rootpath),
        inifilename=None if config.inipath is None else str(config.inipath),
    )
    if options.get("hypothesis_seed", "not installed") is None:
        options["hypothesis_seed"] = str(seed)
    # The arguments say it already.
    options.pop("file_or_dir", None)
    plugins = [argument for name in config.option.plugins for argument in ("-p", name)]
    worker = getattr(config, "workerinput", None)
    return Start(
        options=options,
        args=(*_NO_REWRITE_WARNING, *plugins, *map(str, config.args)),
        pickled=_pickled({name: value for name, value in vars(config.option).items() if name not in options}),
        worker=None if worker is None else {name: value for name, value in worker.items() if is_plain(value)},
    )


def _pickled(values: Mapping[str, object]) -> dict[str, bytes]:
    """Pickles what can be pickled; a value that cannot, such as an open file, is of no use in another process."""
    pickled = {}
    for name, value in values.items():
        with contextlib.suppress(Exception):
            pickled[name] = pickle.dumps(value)
    return pickled


def is_plain(value: object) -> bool:
    """Returns whether a value means the same in a process that has not yet loaded any plugin."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, Path)


def is_collection(value: object) -> bool:
    """Returns whether `as_plain` gives a collection."""
    return isinstance(value, (list, tuple, set, frozenset, dict))


def as_plain(value: Any) -> Any:
    """Returns a value with texts in place of the objects in it that may mean nothing in another process."""
    if is_plain(value):
        return value
    if isinstance(value, dict):
        return {as_plain(key): as_plain(item) for key, item in value.items()}
    if is_collection(value):
        items = [as_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return str(value)
