"""The oracle: copies of a program that know nothing of each other, and the mean of their gradients taken by hand."""

from __future__ import annotations

import threading
from typing import Any

import torch
from objects import Program
from operations import Plan, Step
from snapshot import Snapshot, snapshot

REPLICAS = 2


class _Copies:
    """The copies, whose steps take turns: one computes, the other waits for its turn or for a value.

    Args:
        programs: one for each replica.
    """

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs
        self.values: list[torch.Tensor | None] = [None] * len(programs)
        self._turn = threading.Lock()
        self._all_here = threading.Barrier(len(programs))

    def run(self, step: Step, same_data: bool) -> None:
        """One step of all copies; raises what one of them has raised."""
        errors: list[BaseException] = []
        device = torch.get_default_device()

        def body(replica: int) -> None:
            if device.type != "cpu":
                torch.set_default_device(device)  # each thread has its own
            with self._turn:
                try:
                    step.run(self.programs[replica], _ByHand(self, replica), replica, same_data)
                except threading.BrokenBarrierError:
                    pass  # the other one has failed
                except BaseException as error:
                    errors.append(error)
                    self._all_here.abort()

        threads = [threading.Thread(target=body, args=(replica,)) for replica in range(len(self.programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Lets the other one compute until it waits too."""
        self._turn.release()
        try:
            self._all_here.wait()
        finally:
            self._turn.acquire()

    def average_gradients(self) -> None:
        """Gives all copies the mean of their gradients; one without gradient counts as zeros."""
        for alike in zip(*(dict.fromkeys(program.parameters()) for program in self.programs), strict=True):
            if all(parameter.grad is None for parameter in alike):
                continue
            mean = _mean([torch.zeros_like(p) if p.grad is None else p.grad for p in alike]).detach()
            for parameter in alike:
                if parameter.grad is None or parameter.grad.requires_grad:
                    parameter.grad = mean.clone()
                else:  # who has kept it, or memory of which it is a part, has the mean too
                    parameter.grad.copy_(mean)


class _ByHand:
    """See ``Exchange``."""

    def __init__(self, copies: _Copies, replica: int) -> None:
        self._copies, self._replica = copies, replica

    def backward(self, loss: torch.Tensor, program: Program, **options: Any) -> None:
        loss.backward(**options)
        self._copies.wait()
        if self._replica == 0:
            self._copies.average_gradients()
        self._copies.wait()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        values = self._copies.values
        values[self._replica] = value
        self._copies.wait()
        mean = _mean([part for part in values if part is not None])
        self._copies.wait()
        return mean


def _mean(parts: list[torch.Tensor]) -> torch.Tensor:
    return _sum(parts) / len(parts)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds as two processes of two replicas do: each its own first."""
    half = (len(parts) + 1) // 2
    return _sum(parts[:half]) + _sum(parts[half:]) if len(parts) > 1 else parts[0]


def run_by_hand(plan: Plan, always: bool = False, replicas: int = REPLICAS) -> list[list[Snapshot] | None]:
    """Runs a program.

    Args:
        plan: of it.
        always: look at it after each operation, whatever the plan says.
        replicas: how many copies there are.

    Returns:
        For each operation the values of the copies, or ``None`` where the plan does not look at them.
    """
    copies = _Copies([plan.build() for _ in range(replicas)])
    found: list[list[Snapshot] | None] = []
    for place, operation in enumerate(plan.operations):
        if isinstance(operation, Step):
            copies.run(operation, plan.same_data)
        else:
            for program in copies.programs:
                operation.between(program)
        looks = always or plan.looks(place)
        found.append([snapshot(program) for program in copies.programs] if looks else None)
    return found
