"""Random numbers by (seed, step, replica): a replica draws the same ones wherever and however often it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.runtime.random_streams import RandomStreams, python_state, seed_of, seed_python, set_python_state

ProcessNumbers = tuple[torch.Tensor, Any]
"""The state of torch's generator of the CPU; that of ``random`` and numpy, or ``None``."""


class StepRandomStreams(RandomStreams):
    """The states of torch's generator, made anew for each step and replica; on request also of ``random`` and numpy.

    Args:
        devices: of all replicas.

    Attributes:
        root: the seed of the job; ``None`` before the workers have agreed on one.
        python: whether a replica has streams of ``random`` and numpy, too.
        step: the step under way, or the last one; -1 before the first.
        ahead: the steps that were made before the checkpoint that the job was restored from.
        held: the replicas of this worker.
    """

    def __init__(self, devices: Sequence[ReplicaDevice]) -> None:
        super().__init__(devices, 0)
        self.root: int | None = None
        self.python = False
        self.step, self.ahead = -1, 0
        self.held: Sequence[int] = ()
        self._running, self._joint = False, 0
        self._own_python: dict[int, Any] = {}  # of replicas inside of an optimizer's step

    def seed(self, seed: int, python: bool = False) -> None:
        """Starts all streams anew."""
        self.root, self.python, self.ahead = seed, python, 0
        if python:
            seed_python(seed)

    def kept(self) -> dict[str, Any] | None:
        """What makes the numbers of the steps to come, to be put back in another job."""
        return None if self.root is None else {"root": self.root, "steps": self.step + 1 + self.ahead}

    def takes(self, kept: Mapping[str, Any]) -> bool:
        return "root" in kept

    def put_back(self, kept: Mapping[str, Any]) -> None:
        self.root, self.ahead = kept["root"], kept["steps"] - (self.step + 1)

    def of_process(self) -> ProcessNumbers:
        """The process' own numbers between steps; those of ``random`` and numpy where each replica has its own."""
        return torch.get_rng_state(), python_state() if self.python else None

    def of_process_again(self, kept: ProcessNumbers) -> None:
        """The process goes on with its own numbers."""
        torch.set_rng_state(kept[0])
        if kept[1] is not None:
            set_python_state(kept[1])

    def begin_step(self) -> None:
        """The numbers from now on are those of the first replica of this worker."""
        self._forget_updates()
        for replica in self.held:
            self._states[replica] = self._made(replica, self._number(str(replica)))
        self._active, self._running, self._joint = self.held[0], True, 0
        self._own_python.clear()
        self._python = [None] * len(self._states) if self.python else None
        if self._python is not None:
            for replica in reversed(self.held):  # the first replica's are the last to be set
                self._python[replica] = seed_python(self._number(f"python {replica}"))
        state = self._states[self.held[0]]
        if state is not None:
            self._set(self.held[0], state)

    def end_step(self) -> None:
        """The numbers from now on are the process' own; whoever calls puts their state back."""
        self._running = False

    def begin(self) -> None:
        """See ``RandomStreams``; a step begins with ``begin_step``."""

    def switch(self, replica: int) -> None:
        if self._running:
            super().switch(replica)

    def begin_update(self) -> None:
        """A replica begins an optimizer's step: all replicas draw the same numbers in it."""
        replica = self._active
        self._depth[replica] += 1
        if self._depth[replica] == 1:
            number = self._number(f"update {self._updates[replica]}")
            self._own[replica] = self._now(replica)
            self._set(replica, self._made(replica, number))
            if self.python:
                self._own_python[replica] = python_state()
                seed_python(number)

    def end_update(self) -> None:
        """The step is made: the replica goes on with its own stream."""
        replica = self._active
        self._depth[replica] = max(self._depth[replica] - 1, 0)
        own = self._own[replica]
        if self._depth[replica] == 0 and own is not None:
            self._updates[replica] += 1
            self._own[replica] = None
            self._set(replica, own)
            if (python := self._own_python.pop(replica, None)) is not None:
                set_python_state(python)

    @contextmanager
    def joint_work(self) -> Iterator[None]:
        """Inside, what the replicas do together draws the same numbers on all workers, whichever replicas they hold."""
        replica, self._joint = self._active, self._joint + 1
        own, number = self._now(replica), self._number(f"joint {self._joint}")
        self._set(replica, self._made(replica, number))
        python = python_state() if self.python else None
        if self.python:
            seed_python(number)
        try:
            yield
        finally:
            self._set(replica, own)
            if python is not None:
                set_python_state(python)

    def _number(self, what: str) -> int:
        return seed_of(f"{self.root} {self.step + self.ahead} {what}".encode())
