"""The states of the random number generators of a worker, to be kept with a checkpoint."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from tfstyle_dist.core.devices import accelerator, accelerators, count_devices, random_states
from tfstyle_dist.core.logging import warn_once


class RandomState:
    """Python's, torch's and, if it is loaded, numpy's random number generators of this process.

    Of torch those of the CPU and of all accelerators that the process uses.

    Give one to ``Checkpoint``: each worker then saves its own, and gets it back. If ``Strategy.seed_replicas`` was
    called, the streams of the worker's other replicas are saved, too, and go on where the worker has as many replicas
    again; with another number they do not, and a warning says so. Without that call they are derived from the first.

    A checkpoint restored on more workers than it was saved by has nothing for the last ones: they are seeded from the
    first worker's state and their own number, and a warning says so. In an elastic job one worker writes for all: its
    states go to worker 0, and all others are seeded so. What its steps draw goes on, with any number of workers.

    Example:
        >>> checkpoint = Checkpoint(model=model, random=RandomState())
    """

    def state_dict(self) -> dict[str, Any]:
        """The present states."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
        }
        for kind in accelerators():
            state[kind] = random_states(kind)
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts states back."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        for kind in accelerators():
            for device, own in enumerate(state.get(kind, [])[: count_devices(kind)]):
                accelerator(kind).set_rng_state(own, device)
        if "numpy" in state:
            import importlib

            importlib.import_module("numpy").random.set_state(state["numpy"])

    def load_states(self, states: Mapping[int, Mapping[str, Any]], worker: int) -> None:
        """Puts one worker's state back.

        Args:
            states: of all workers that saved, by number.
            worker: the number of this one.
        """
        if worker in states:
            self.load_state_dict(states[worker])
            return
        warn_once(
            "random state of a new worker",
            f"The checkpoint has random states of {len(states)} worker(s), none for worker {worker}: it is seeded from "
            "the first worker's state and its own number.",
        )
        self.load_state_dict(states[0])
        seed = (int(torch.randint(2**62, ())) + worker) % 2**62
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
