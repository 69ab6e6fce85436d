"""torch's random numbers: a stream for each replica of a process.

Replica 0 draws what its process would draw; the others have streams of their own. After ``seed`` these go on from run
to run, as in processes of their own. Without it they are derived, whenever a run begins, from the state that replica 0
finds then, so that the same program draws the same numbers every time. Between processes ``Strategy.seed_replicas``
makes the difference, and in elastic jobs ``elastic.steps.step_random``.
"""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.core.devices import ReplicaDevice, accelerator, is_accelerator
from tfstyle_dist.core.untraced import untraced

_State = tuple[torch.Tensor | int, torch.Tensor | None]  # of the CPU, where a number is a seed; of the device


class RandomStreams:
    """The states of torch's generators, by replica.

    Args:
        devices: of the local replicas.
        first: number of local replica 0 among all replicas.
    """

    def __init__(self, devices: Sequence[ReplicaDevice], first: int) -> None:
        self._devices, self._first = [d.torch_device for d in devices], first
        self._accelerated = [is_accelerator(d.type) for d in devices]
        self._states: list[_State | None] = [None] * len(devices)
        self._active = 0
        self._seed: int | None = None
        self._derived_from = (-1, 0)
        self._python: list[Any] | None = None
        self._forget_updates()

    def seed(self, seed: int, python: bool = False) -> None:
        """Starts every stream anew; replica 0's is the process' own.

        Args:
            seed: that of replica ``r`` is ``seed + r``.
            python: the streams of ``random`` and numpy too.
        """
        first = seed + self._first
        self._python = None
        if python:
            self._python = [seed_python(first + replica) for replica in reversed(range(len(self._states)))][::-1]
        torch.manual_seed(first)
        self._seed = torch.initial_seed()
        for replica in range(1, len(self._states)):
            self._states[replica] = self._made(replica, first + replica)

    def __len__(self) -> int:
        return len(self._states)

    def kept(self) -> dict[str, Any] | None:
        """The streams, to be put back another time, if they were seeded; the process' own is not among them."""
        if self._seed is None or self._seed != torch.initial_seed():
            return None
        others = [None if r == self._active or state is None else list(state) for r, state in enumerate(self._states)]
        return {"torch": others, "python": self._python}

    def takes(self, kept: Mapping[str, Any]) -> bool:
        """Whether ``put_back`` can go on with these: they are of as many replicas, and not of an elastic job."""
        return len(kept.get("torch", ())) == len(self)

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Goes on with streams of as many replicas; the process' own has been put back before."""
        self._seed = torch.initial_seed()
        for replica, state in enumerate(kept["torch"]):
            if state is not None:
                self._states[replica] = (state[0], state[1])
        self._python = kept["python"]

    @untraced
    def begin_update(self) -> None:
        """A replica begins an optimizer's step: unless all were seeded, they draw replica 0's numbers in it."""
        replica = self._active
        self._depth[replica] += 1
        if self._seed is not None or self._depth[replica] > 1:
            return
        number = self._updates[replica]
        if number == len(self._before_updates):  # this replica is the first to come to its step of this number
            own = self._now(0) if replica == 0 else self._after_update[replica] or self._states[0]
            self._before_updates.append(own or self._now(replica))
        self._own[replica] = self._now(replica)
        self._set(replica, self._before_updates[number])

    @untraced
    def end_update(self) -> None:
        """The step is made: a replica but the first goes on with its own stream."""
        replica = self._active
        self._depth[replica] = max(self._depth[replica] - 1, 0)
        own = self._own[replica]
        if self._depth[replica] or own is None:
            return
        self._updates[replica] += 1
        self._own[replica] = None
        if replica:
            self._after_update[replica] = self._now(replica)
            self._set(replica, own)

    def _forget_updates(self) -> None:
        count = len(self._states)
        self._depth, self._updates = [0] * count, [0] * count
        self._before_updates: list[_State] = []
        self._own: list[_State | None] = [None] * count
        self._after_update: list[_State | None] = [None] * count

    def begin(self) -> None:
        """A run begins."""
        self._forget_updates()
        if self._seed is not None and self._seed == torch.initial_seed():
            return
        self._seed = None
        digest = 0
        for state in self._now(0):  # a step on a device draws its numbers there, and leaves the CPU's state as it was
            digest = zlib.crc32(state.numpy().data, digest) if isinstance(state, torch.Tensor) else digest
        before, times = self._derived_from
        times = times + 1 if digest == before else 0
        self._derived_from = digest, times
        for replica in range(1, len(self._states)):
            name = f"{torch.initial_seed()} {digest} {times} {self._first + replica}"
            self._states[replica] = self._made(replica, seed_of(name.encode()))

    def switch(self, replica: int) -> None:
        """The next numbers are the replica's."""
        if replica == self._active:
            return
        self._states[self._active] = self._now(self._active)
        state = self._states[replica]
        if state is not None:
            self._set(replica, state)
        if replica == 0:
            self._after_update = [None] * len(self._states)
        if self._python is not None:
            self._python[self._active] = python_state()
            set_python_state(self._python[replica])
        self._active = replica

    def _set(self, replica: int, state: _State) -> None:
        if isinstance(state[0], int):
            torch.default_generator.manual_seed(state[0])
        else:
            torch.default_generator.set_state(state[0])
        if state[1] is not None:
            device = self._devices[replica]
            module = accelerator(device.type)
            if not torch.equal(module.get_rng_state(device), state[1]):  # else cuDNN would make its dropout anew
                module.set_rng_state(state[1], device)

    def _now(self, replica: int) -> _State:
        device = self._devices[replica]
        own = accelerator(device.type).get_rng_state(device) if self._accelerated[replica] else None
        return torch.default_generator.get_state(), own

    def _made(self, replica: int, seed: int) -> _State:
        device = self._devices[replica]
        own = torch.Generator(device).manual_seed(seed).get_state() if is_accelerator(device.type) else None
        return seed, own


def is_of_the_streams(generator: torch.Generator) -> bool:
    """Whether this is a generator that functions without one draw from: its states are those of ``RandomStreams``."""
    if generator is torch.default_generator:
        return True
    kind = generator.device.type
    known = getattr(accelerator(kind), "default_generators", ()) if is_accelerator(kind) else ()
    return any(generator is own for own in known)


def seed_of(text: bytes) -> int:
    """A seed made of a text, from 0 to 2**63 - 1; other texts almost surely give others."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_python(seed: int) -> Any:
    """Starts the streams of ``random`` and, where it is loaded, numpy; returns their states."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    return python_state()


def python_state() -> Any:
    """The states of the streams of ``random`` and, where it is loaded, numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":  # as numpy gives it where it is not asked for another form
        own = state["state"]
        state = state["bit_generator"], own["key"], own["pos"], state["has_gauss"], state["gauss"]
    return random.getstate(), state


def set_python_state(state: Any) -> None:
    """Goes on with streams from a state that ``python_state`` gave."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
