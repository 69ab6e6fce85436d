"""Programs that nobody has written, on parameter servers (``server_programs.py``)."""

from __future__ import annotations

import collections
import functools
import os
import sys
from pathlib import Path

import cloudpickle
import pytest
import server_programs
from generate import FIRST, PROGRAMS, plan_of
from server_programs import for_servers, for_shards, outcome_on_servers
from shrink import SAME, shrunk

import tfstyle_dist as tfd

ON_SERVERS = PROGRAMS // 4
cloudpickle.register_pickle_by_value(sys.modules[server_programs.__name__])


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.timeout(600)
@pytest.mark.cpu_only("what one device computes is computed on the CPU")
@pytest.mark.filterwarnings("ignore")  # of torch, about programs that are odd
def test_programs_on_servers(monkeypatch: pytest.MonkeyPatch, servers: int) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # the tasks import the programs
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as this process, so that nothing is added in another order
    kinds: collections.Counter[str] = collections.Counter()
    with tfd.Server.local_cluster(workers=1, ps=servers) as cluster:
        for seed in range(2 * (FIRST + ON_SERVERS * (servers - 1)), 2 * (FIRST + ON_SERVERS * servers), 2):
            plan = for_servers(plan_of(seed))
            plan = plan if servers == 1 else for_shards(plan)
            outcome = outcome_on_servers(plan, cluster)
            if outcome.fails:
                plan, outcome = shrunk(plan, functools.partial(outcome_on_servers, cluster=cluster))
                pytest.fail(f"{plan}\n  {outcome.kind}: {outcome.text}")
            kinds[outcome.kind] += 1
    assert kinds[SAME] > ON_SERVERS // 2, kinds
