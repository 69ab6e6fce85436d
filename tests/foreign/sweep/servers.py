"""The form ``servers``: a parameter server whose one worker makes a step at a time; one cluster for all cases.

The program runs in the coordinator's process; what it gives to ``run.run`` is scheduled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from programs import Each, Run, flat

import tfstyle_dist as tfd

SECONDS = 60.0
IN_COPIES = "a worker has copies of a program's own objects, and what a function counts or keeps in them stays there"
_IN_COPIES: frozenset[str] = frozenset()


def differs(title: str) -> str | None:
    """Why a case differs where its steps are made by a worker."""
    return IN_COPIES if title in _IN_COPIES else None


_clusters: list[Any] = []


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """The cluster of ``strategy``; its processes import the modules of the cases."""
    before, here = os.environ.get("PYTHONPATH"), Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), *([before] if before else [])])
    try:
        with tfd.Server.local_cluster(workers=1, ps=1) as started:
            _clusters.append(started)
            yield
    finally:
        _clusters.clear()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def strategy() -> Iterator[Any]:
    """A new strategy on the cluster, which the next one can use as well."""
    made = tfd.ParameterServerStrategy(_clusters[0], max_staleness=0)
    try:
        yield made
    finally:
        if made.coordinator is not None:
            made.coordinator.close(end_workers=False)
        made.servers.close()
        made.context.close()


class ServersRun(Run):
    """What a program sees of parameter servers; on a worker it is the run of one device.

    Args:
        strategy: of the servers.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__("servers", strategy)
        self._coordinator = tfd.coordinator.ClusterCoordinator(strategy)

    def __reduce__(self) -> Any:
        return Run, ("one",)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = _Work(torch.get_default_dtype(), function)
        result = self._coordinator.schedule(work, args=args, kwargs=kwargs)
        self._coordinator.join(timeout=SECONDS)
        return result.get(timeout=SECONDS)

    def local(self, value: Any) -> list[Any]:
        return [value]

    def each(self, function: Callable[[], Any]) -> Each:
        """The values that the coordinator's program sees."""
        return Each([flat(function())])

    def mean(self, gradients: Any) -> Any:
        return gradients


class _Work:
    def __init__(self, dtype: torch.dtype, function: Callable[..., Any]) -> None:
        self._dtype, self._function = dtype, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.set_default_dtype(self._dtype)
        return self._function(*args, **kwargs)
