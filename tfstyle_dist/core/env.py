"""The settings of the package that are environment variables (the table in README.md).

The other variables that it reads are those of launchers: ``launch_env``, which also sets some
for the tasks that it starts. No other module but those of ``testing`` reads any.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

DEFAULT_TIMEOUT = timedelta(minutes=5)
_MOST_SECONDS = 10 * 365 * 86_400.0
SETTINGS = tuple(
    f"TFSTYLE_{name}"
    for name in (
        "TIMEOUT_SECONDS", "START_TIMEOUT_SECONDS", "DEBUG", "SHARED_MEMORY", "MONITOR", "HOST", "PS_KEYS",
        "PS_INSECURE", "PS_TCP", "PS_PATIENCE_SECONDS", "LOG_LEVEL", "RENDEZVOUS_FILE",
    )
)  # fmt: skip
"""All that a user may set; the table in README.md explains them."""


def gloo_interface() -> str | None:
    """``GLOO_SOCKET_IFNAME``: the network interface for Gloo."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def gloo_interface_set(name: str | None) -> AbstractContextManager[None]:
    """Sets ``GLOO_SOCKET_IFNAME`` for a while, unless the user has.

    Args:
        name: the interface, ``None`` to leave the choice to Gloo.
    """
    return set_for_a_while({} if name is None else {"GLOO_SOCKET_IFNAME": name})


@contextmanager
def set_for_a_while(wanted: Mapping[str, str]) -> Iterator[None]:
    """Sets those of some variables that are not there, or are empty, and puts them back at the end."""
    before = {name: value for name in wanted if not (value := os.environ.get(name))}
    os.environ.update({name: wanted[name] for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def timeout(default: timedelta | None = DEFAULT_TIMEOUT) -> timedelta | None:
    """``TFSTYLE_TIMEOUT_SECONDS``: the limit of every wait; 0 waits for ever; default 300.

    Args:
        default: the limit where the variable is not set.
    """
    return _seconds("TFSTYLE_TIMEOUT_SECONDS", default)


def start_timeout(default: timedelta | None) -> timedelta | None:
    """``TFSTYLE_START_TIMEOUT_SECONDS``: the limit of the wait for all workers to start; 0 waits for ever.

    Args:
        default: the limit where the variable is not set.
    """
    return _seconds("TFSTYLE_START_TIMEOUT_SECONDS", default)


def _seconds(name: str, default: timedelta | None) -> timedelta | None:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number of seconds; write e.g. 300, or 0 for no limit.") from None
    if seconds < 0:
        raise ValueError(f"{name}={text!r} is negative; write e.g. 300, or 0 for no limit.")
    if not seconds <= _MOST_SECONDS:
        raise ValueError(f"{name}={text!r} is no time that one can wait; write e.g. 300, or 0 for no limit.")
    return timedelta(seconds=seconds) if seconds else None


def debug_collectives() -> bool:
    """``TFSTYLE_DEBUG`` contains ``collectives``: compare every call over the workers first, gradients and GPUs too."""
    return "collectives" in os.environ.get("TFSTYLE_DEBUG", "").split(",")


def shared_memory() -> bool:
    """``TFSTYLE_SHARED_MEMORY``: 0 makes CPU workers of one host use sockets instead; default 1."""
    return os.environ.get("TFSTYLE_SHARED_MEMORY", "1") != "0"


def host_name() -> str | None:
    """``TFSTYLE_HOST``: a name for this host instead of its own; workers of different names share no memory."""
    return os.environ.get("TFSTYLE_HOST") or None


def parameter_server_keys() -> str | None:
    """``TFSTYLE_PS_KEYS``: path of the cluster's key file; unset: no encryption, loopback only."""
    return os.environ.get("TFSTYLE_PS_KEYS") or None


def set_parameter_server_keys(path: str | None) -> None:
    """Sets ``TFSTYLE_PS_KEYS`` for what this process makes from now on.

    Args:
        path: of the key file; ``None`` removes the variable.
    """
    if path is None:
        os.environ.pop("TFSTYLE_PS_KEYS", None)
    else:
        os.environ["TFSTYLE_PS_KEYS"] = path


def insecure_parameter_server() -> bool:
    """``TFSTYLE_PS_INSECURE``: 1 lets servers without keys listen on any interface."""
    return os.environ.get("TFSTYLE_PS_INSECURE", "0") == "1"


def parameter_server_tcp(with_keys: bool) -> bool:
    """``TFSTYLE_PS_TCP``: whether tensors between hosts travel by plain TCP; default 1.

    0: never; 1: where there are no keys; ``always``: with keys too, so whoever reads the network sees them
    (the launcher sets it for the tasks of a job whose key it has made, if it is not set).

    Raises:
        ValueError: another value.
    """
    value = os.environ.get("TFSTYLE_PS_TCP", "1")
    if value not in ("0", "1", "always"):
        raise ValueError(
            f"TFSTYLE_PS_TCP={value!r}: write 0 (tensors travel by ZeroMQ), 1 (by plain TCP where there are no keys) "
            "or always (by plain TCP, not encrypted, also with keys)."
        )
    return value == "always" or (value == "1" and not with_keys)


def coordinator_grace() -> float:
    """``TFSTYLE_PS_PATIENCE_SECONDS``: how long ps and worker tasks wait for a silent coordinator; default 60."""
    text = os.environ.get("TFSTYLE_PS_PATIENCE_SECONDS") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"TFSTYLE_PS_PATIENCE_SECONDS={text!r} is not a number of seconds above 0; write e.g. 60.")
    return seconds


def prefer_large_pages() -> None:
    """``THP_MEM_ALLOC_ENABLE``: makes torch ask for large pages for large tensors, unless the user has decided.

    Torch looks when it makes the first tensor of a process.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def log_level() -> str:
    """``TFSTYLE_LOG_LEVEL``: level of the package's logger; default WARNING.

    Raises:
        ValueError: the logging module has no such level.
    """
    level = (os.environ.get("TFSTYLE_LOG_LEVEL") or "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"TFSTYLE_LOG_LEVEL={level!r} is no level; write DEBUG, INFO, WARNING, ERROR or CRITICAL.")
    return level


def prefer_torch_backend_of_keras() -> None:
    """Makes torch the backend of a Keras that is imported later, unless the user has chosen one."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")


def monitor() -> bool:
    """``TFSTYLE_MONITOR``: whether strategies count where the time of their steps goes."""
    return os.environ.get("TFSTYLE_MONITOR", "1") != "0"


def refused() -> list[str]:
    """What is said of the variables whose values are refused when they are used, all of them."""
    found = []
    for read in (
        timeout, lambda: start_timeout(None), coordinator_grace, lambda: parameter_server_tcp(False), log_level,
    ):  # fmt: skip
        try:
            read()
        except ValueError as error:
            found.append(str(error))
    return found


def without_effect() -> list[str]:
    """What is to be said of the variables whose values do not do what they may be meant to."""
    found = []
    for name in ("TFSTYLE_SHARED_MEMORY", "TFSTYLE_MONITOR", "TFSTYLE_PS_INSECURE"):
        if (value := os.environ.get(name, "")) not in ("", "0", "1"):
            found.append(f"{name}={value!r} is neither 0 nor 1 and has no effect")
    if other := set(os.environ.get("TFSTYLE_DEBUG", "").split(",")) - {"collectives", ""}:
        found.append(f"TFSTYLE_DEBUG has {sorted(other)}, and only 'collectives' has an effect")
    for name in sorted(set(os.environ) - set(SETTINGS)):
        if near := _meant(name.upper()):
            which = f"the name of the setting is {near[0]}" if len(near) == 1 else f"it may be one of {', '.join(near)}"
            found.append(f"{name} has no effect; {which}")
    return found


def _meant(name: str) -> list[str]:
    """The settings that a name looks like."""
    if not name.startswith("TFSTYLE_"):
        return []
    begun = [setting for setting in SETTINGS if setting.startswith(name)]
    return begun or difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.8)
