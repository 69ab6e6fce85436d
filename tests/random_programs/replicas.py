"""Runs programs by the package: on two replicas of this process, or on the replica of this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from objects import Program
from operations import Call, Plan, Step
from oracle import REPLICAS
from snapshot import Snapshot, snapshot

import tfstyle_dist as tfd


def _context() -> Any:
    return tfd.get_replica_context()


class _ByPackage:
    """See ``Exchange``: there is nothing to be done by hand."""

    def backward(self, loss: torch.Tensor, program: Program, **options: Any) -> None:
        loss.backward(**options)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = _context().all_reduce("MEAN", value)
        return mean


class Runner:
    """Builds a program in a strategy's scope and does its operations.

    Args:
        strategy: of the replicas.
        plan: of the program.

    Attributes:
        program: it.
        before: called in a step with the replica and the place of what it does next.
    """

    def __init__(self, strategy: tfd.Strategy, plan: Plan) -> None:
        with strategy.scope():
            program = plan.build()
        exchange, same_data = _ByPackage(), plan.same_data

        def step(operation: Step) -> None:
            replica = _context().replica_id_in_sync_group
            operation.run(program, exchange, replica, same_data, lambda place: self.before(replica, place))

        self.program, self._strategy, self._step = program, strategy, step
        self.before: Callable[[int, int], None] = lambda replica, place: None

    def do(self, operation: Call | Step) -> None:
        """Does one operation."""
        if isinstance(operation, Step):
            self._strategy.run(self._step, args=(operation,))
        else:
            with self._strategy.scope():
                operation.between(self.program)

    def look(self) -> dict[int, Snapshot]:
        """The values of the replicas of this process, by replica."""
        seen: dict[int, Snapshot] = {}

        def look() -> None:
            seen[_context().replica_id_in_sync_group] = snapshot(self.program)

        self._strategy.run(look)
        return seen


def run_in_process(plan: Plan, central: bool = False, replicas: int = REPLICAS) -> list[list[Snapshot] | None]:
    """Runs a program on replicas of this process.

    Args:
        plan: of it.
        central: whether there is one copy of the parameters for all.
        replicas: their number.

    Returns:
        For each operation the values of the replicas, or ``None`` where the plan does not look at them.
    """
    found: list[list[Snapshot] | None] = []
    devices = [f"cpu:{replica}" for replica in range(replicas)]
    storage = tfd.experimental.CentralStorageStrategy
    with storage(devices, "cpu:0") if central else tfd.MirroredStrategy(devices) as strategy:
        runner = Runner(strategy, plan)
        for place, operation in enumerate(plan.operations):
            runner.do(operation)
            if plan.looks(place):
                seen = runner.look()
                found.append([seen[replica] for replica in range(replicas)])
            else:
                found.append(None)
    return found


def run_on_rank(plan: Plan, devices: list[str] | None) -> list[Snapshot]:
    """Runs a program on the ranks of a distributed test.

    Args:
        plan: of it.
        devices: of the replicas of each rank; ``None``: one, and the ranks have one copy of the parameters.

    Returns:
        For each operation the values of this rank's first replica.
    """
    found = []
    storage = tfd.experimental.CentralStorageStrategy
    with storage() if devices is None else tfd.MirroredStrategy(devices) as strategy:
        runner = Runner(strategy, plan)
        for operation in plan.operations:
            runner.do(operation)
            found.append(snapshot(runner.program))
    return found
