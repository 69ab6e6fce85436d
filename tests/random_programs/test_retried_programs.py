"""Random programs of which an elastic job does one step again: the end is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import random

import pytest
import snapshot
from elastic_programs import Fault, elastic_plan, fault_of, run_elastic
from generate import BLOCK, FIRST, PROGRAMS
from oracle import REPLICAS, run_by_hand

from tfstyle_dist.elastic.membership.membership import MembershipChanged

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.cpu_only("elastic jobs compute on the CPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about programs that are odd
]


@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS // 2, BLOCK))
def test_a_step_is_done_again(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "TOLERANCE", 0.0)
    compared = 0
    for seed in range(first, first + BLOCK):
        plan = elastic_plan(seed)
        fault, hit = fault_of(plan), random.Random(seed).randrange(REPLICAS)
        try:
            run_by_hand(plan)
        except Exception:
            continue  # counted with the other programs
        missing = [True]

        def before(place: Fault, replica: int) -> None:
            if missing and place == fault and replica == hit:  # noqa: B023
                missing.clear()  # noqa: B023
                raise MembershipChanged("another worker died")

        undisturbed = run_elastic(plan, lambda place, replica: None)
        disturbed = run_elastic(plan, before)
        for replica in range(REPLICAS):
            difference = snapshot.first_difference(undisturbed[replica], disturbed[replica])
            assert difference is None, f"{plan}\n  replica {replica}, fault at {fault} of {hit}: {difference}"
        compared += not missing
    assert compared
