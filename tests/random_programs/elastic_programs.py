"""Random programs in elastic jobs, in which a worker dies, or seems to have died; also a worker's own program.

    elastic_programs.py SEED [KILLED]

runs one worker of a job of two replicas. The worker whose number is KILLED ends itself in one of the steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # where it runs as a worker

from generate import plan_of
from operations import Plan, Step
from oracle import REPLICAS
from replicas import Runner
from snapshot import Snapshot

import tfstyle_dist as tfd

MADE_IN_STEPS = {
    "use_helper",
    "new_optimizer_in_step",
    "new_teacher_in_step",
    "add_teacher_to_list",
    "use_lazy_layer",
}
"""What an elastic job refuses: objects that a step makes and keeps, and parameters that come into being in a step."""
Fault = tuple[int, int]
"""The operation and the place in it."""


def elastic_plan(seed: int) -> Plan:
    """A plan that an elastic job can carry out.

    Args:
        seed: of which it is drawn.
    """
    return plan_of(seed).without(MADE_IN_STEPS)


def fault_of(plan: Plan) -> Fault | None:
    """Where in a program something happens; ``None`` if it has no step.

    Args:
        plan: of it.
    """
    chance = random.Random(plan.seed)
    steps = [place for place, operation in enumerate(plan.operations) if isinstance(operation, Step)]
    if not steps:
        return None
    place = chance.choice(steps)
    step = plan.operations[place]
    assert isinstance(step, Step)
    return place, chance.randint(0, len(step.calls))


def run_elastic(plan: Plan, before: Callable[[Fault, int], None]) -> dict[int, Snapshot]:
    """Runs a program in an elastic job of two replicas.

    Args:
        plan: of it.
        before: called with each place of it and the replica that comes there.

    Returns:
        The values of the replicas of this worker at the end.
    """
    with tfd.MultiWorkerMirroredStrategy(
        elastic=tfd.experimental.Elastic(replicas=REPLICAS, suspect_after=30)
    ) as strategy:
        runner = Runner(strategy, plan)
        for number, operation in enumerate(plan.operations):
            runner.before = lambda replica, place, number=number: before((number, place), replica)  # type: ignore[misc]
            runner.do(operation)
        return runner.look()


def _digest(value: torch.Tensor | float | str) -> str:
    what = (
        value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if _is_dense(value) else repr(value).encode()
    )
    return hashlib.sha256(what).hexdigest()[:16]


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0 and value.layout is torch.strided


def main() -> None:
    """One worker."""
    torch.set_num_threads(1)
    plan = elastic_plan(int(sys.argv[1]))
    me, killed = json.loads(os.environ["TF_CONFIG"])["task"]["index"], [*map(int, sys.argv[2:])]
    fault = fault_of(plan) if me in killed else None

    def before(place: Fault, replica: int) -> None:
        if place == fault:
            os.kill(os.getpid(), signal.SIGKILL)

    found = run_elastic(plan, before)
    digests = {replica: {name: _digest(value) for name, value in values.items()} for replica, values in found.items()}
    print("result", json.dumps(digests), flush=True)


if __name__ == "__main__":
    main()
