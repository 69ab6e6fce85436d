"""What `@pytest.mark.distributed(...)` says, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

MARKER = "distributed"
DEFAULT_WORKERS = 2
DEFAULT_TIMEOUT = 60.0
DEFAULT_DEADLINE = 20.0
DEFAULT_BACKEND = "gloo"
_ARGUMENTS = ("workers", "replicas", "backend", "timeout", "deadline", "devices", "env", "may_die")
_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class DistributedOptions:
    """The arguments of one `distributed` marker.

    Attributes:
        workers: How many rank processes run the test body.
        replicas: How many local replicas each worker has in the fixture `strategy`.
        backend: The backend of the fixture `process_group`, `gloo` or `nccl`.
        timeout: Seconds after which the ranks' stacks are dumped and the ranks are killed.
        deadline: Seconds that a process group waits for its peers: `TFSTYLE_TIMEOUT_SECONDS` in the ranks.
        devices: How many CUDA devices the test needs; with fewer the test is skipped. None needs none.
        env: Environment variables of every rank during the test; a value of None removes the variable.
        may_die: Ranks whose death or missing report is part of the test.
    """

    workers: int = DEFAULT_WORKERS
    replicas: int = 1
    backend: str = DEFAULT_BACKEND
    timeout: float = DEFAULT_TIMEOUT
    deadline: float = DEFAULT_DEADLINE
    devices: int | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    may_die: frozenset[int] = frozenset()


def options_from_mark(
    mark: pytest.Mark, timeout: float = DEFAULT_TIMEOUT, deadline: float = DEFAULT_DEADLINE
) -> DistributedOptions:
    """Reads and checks one `distributed` marker.

    Args:
        mark: The marker nearest to the test.
        timeout: Seconds to use when the marker has no `timeout`.
        deadline: Seconds to use when the marker has no `deadline`. It is shortened to half of the timeout
            where the timeout is not longer, so that a group gives up before its test does.

    Returns:
        The checked options.

    Raises:
        ValueError: If an argument is unknown or outside its range.
        TypeError: If an argument has the wrong type.

    Example:
        >>> options_from_mark(pytest.mark.distributed(workers=4, timeout=30).mark).deadline
        20.0
    """
    if mark.args:
        raise TypeError(
            f"@pytest.mark.{MARKER} got the positional arguments {mark.args!r}; name them, as in "
            f"@pytest.mark.{MARKER}(workers=2)"
        )
    unknown = sorted(set(mark.kwargs) - set(_ARGUMENTS))
    if unknown:
        raise ValueError(f"@pytest.mark.{MARKER} got the unknown arguments {unknown}; it knows {', '.join(_ARGUMENTS)}")
    workers = _count("workers", mark.kwargs.get("workers", DEFAULT_WORKERS))
    timeout = _seconds("timeout", mark.kwargs.get("timeout", timeout))
    if "deadline" in mark.kwargs:
        deadline = _seconds("deadline", mark.kwargs["deadline"])
    elif deadline >= timeout:
        deadline = timeout / 2
    if deadline >= timeout:
        raise ValueError(
            f"@pytest.mark.{MARKER} got deadline={deadline:g} and timeout={timeout:g}; a process group must "
            "give up before its test does, so write a deadline below the timeout"
        )
    devices = mark.kwargs.get("devices")
    return DistributedOptions(
        workers=workers,
        replicas=_count("replicas", mark.kwargs.get("replicas", 1)),
        backend=_backend(mark.kwargs.get("backend", DEFAULT_BACKEND)),
        timeout=timeout,
        deadline=deadline,
        devices=None if devices is None else _count("devices", devices),
        env=_environment(mark.kwargs.get("env")),
        may_die=_ranks(mark.kwargs.get("may_die", ()), workers),
    )


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"@pytest.mark.{MARKER} got {name}={value!r}; write a whole number, as in {name}=2")
    if value < 1:
        raise ValueError(f"@pytest.mark.{MARKER} got {name}={value}; write at least 1")
    return value


def _backend(value: object) -> str:
    if not isinstance(value, str) or value not in _BACKENDS:
        raise ValueError(f"@pytest.mark.{MARKER} got backend={value!r}; write one of {', '.join(_BACKENDS)}")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"@pytest.mark.{MARKER} got {name}={value!r}; write seconds, as in {name}=30")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"@pytest.mark.{MARKER} got {name}={value!r}; write finite seconds above 0")
    return float(value)


def _environment(value: object) -> dict[str, str | None]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and (item is None or isinstance(item, str)) for key, item in value.items()
    ):
        raise TypeError(
            f"@pytest.mark.{MARKER} got env={value!r}; write a dict of strings, as in env={{'NAME': 'x'}}, "
            "with None as the value of a variable to remove"
        )
    return dict(value)


def _ranks(value: object, workers: int) -> frozenset[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (tuple, list, set, frozenset)):
        raise TypeError(f"@pytest.mark.{MARKER} got may_die={value!r}; write a tuple of ranks, like (1,)")
    for rank in value:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < workers:
            raise ValueError(
                f"@pytest.mark.{MARKER} got may_die={value!r} with workers={workers}; write ranks from 0 to "
                f"{workers - 1}"
            )
    return frozenset(value)
