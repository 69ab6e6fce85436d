"""All tasks run the doctor at the same time: do they find each other, and do their clocks and versions agree?"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator

import torch

from tfstyle_dist.cluster_resolver import ClusterResolver
from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.comm.rendezvous.bootstrap import make_group
from tfstyle_dist.doctor.finding import Finding, ok, problem, warning
from tfstyle_dist.doctor.machine import package_version
from tfstyle_dist.strategies.multi_worker_mirrored import members_of

_SKEW_SECONDS = 1.0
_NUMBERS = 1_000_000


def find_tasks(resolver: ClusterResolver, seconds: float) -> Iterator[Finding]:
    """Joins the other tasks, which must run the doctor with ``--meet`` too.

    Args:
        resolver: the cluster.
        seconds: how long to wait for them.
    """
    options = CommunicationOptions(timeout_seconds=seconds)
    try:
        group = make_group(torch.device("cpu"), options, members_of(resolver))
    except Exception as error:
        yield problem("meeting", f"{type(error).__name__}: {error}", "start the doctor on all hosts at the same time")
        return
    try:
        started = time.monotonic()
        group.gather_objects(0, "ready")
        clocks = group.gather_objects(time.time(), "clocks")
        latency = time.monotonic() - started
        versions = [platform.python_version(), torch.__version__, package_version()]
        everyone = group.gather_objects(versions, "versions")
        buffer = torch.ones(_NUMBERS)
        started = time.monotonic()
        group.all_reduce(buffer, "doctor")
        rate = buffer.numel() * buffer.element_size() / (time.monotonic() - started) / 1e6
    except Exception as error:
        yield problem("meeting", f"{type(error).__name__}: {error}", "look at the doctor's output on the other hosts")
        return
    finally:
        group.close()
    if not bool((buffer == group.size).all()):
        yield problem("meeting", "the sum over the workers is wrong", "check the memory and the network of all hosts")
    yield ok("meeting", f"{group.size} workers met; a sum of {_NUMBERS * 4 // 10**6} MB ran at {rate:.0f} MB/s")
    skew = max(clocks) - min(clocks)
    if skew > _SKEW_SECONDS + latency:
        late = [f"worker {rank} {clock - clocks[0]:+.1f} s" for rank, clock in enumerate(clocks)]
        yield warning("clocks", f"clocks differ: {', '.join(late)}", "synchronise them (NTP): logs will not line up")
    else:
        yield ok("clocks", f"clocks agree to {max(skew, latency):.3f} s")
    different = [f"worker {rank}: {' / '.join(other)}" for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        yield problem(
            "versions",
            f"Python / torch / tfstyle_dist differ from worker 0's {' / '.join(everyone[0])}: {'; '.join(different)}",
            "install the same versions on all hosts",
        )
