"""One task as the coordinator sees it: the connection to it, what it has been sent, what it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator import messages
from tfstyle_dist.coordinator.closure import Closure
from tfstyle_dist.parameter_server.protocol.header import FLAG_KEEP
from tfstyle_dist.parameter_server.protocol.peer_loop import Peer
from tfstyle_dist.strategies.parameter_server.optimizer_settings import only_plain


class Task:
    """One task.

    Args:
        name: for messages.
        address: ``host:port``.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.peer: Peer | None = None
        self.ready = self.ever = self.refused = False
        self.incarnation = ""
        self.functions: set[int] = set()
        self.resources: set[int] = set()
        self.values: set[int] = set()  # results that the task should have
        self.settings: dict[int, Sequence[Any]] = {}  # of optimizers
        self.dtype: torch.dtype | None = None  # its default one
        self.running: dict[int, Closure] = {}

    def forget(self) -> None:
        """It is another process now, which has nothing."""
        for known in (self.functions, self.resources, self.values, self.settings):
            known.clear()
        self.dtype = None

    @property
    def socket(self) -> Any:
        """Of its present connection."""
        assert self.peer is not None
        return self.peer.socket

    def give(
        self,
        closure: Closure,
        functions: Mapping[int, Sequence[Any]],
        resources: Mapping[int, Sequence[Any]],
        low_water: int,
        keep: bool,
    ) -> None:
        """Sends a call, and before it what the task does not have yet.

        Args:
            closure: the call.
            functions: pickled functions by number.
            resources: pickled factories of per-worker resources by number.
            low_water: all calls with smaller numbers are finished.
            keep: whether the task is to keep the result for other calls.
        """
        for number in resources.keys() - self.resources:
            self._tell("resource", number, resources[number])
            self.resources.add(number)
        if closure.function not in self.functions:
            self._tell("function", closure.function, functions[closure.function])
            self.functions.add(closure.function)
        for number, groups in closure.settings.items():
            if self.settings.get(number) is not groups:
                self._tell("settings", number, messages.parts_of(only_plain(groups)))
                self.settings[number] = groups
        if (dtype := torch.get_default_dtype()) is not self.dtype:
            self._tell("dtype", 0, messages.parts_of(dtype))
            self.dtype = dtype
        for value in closure.values:
            if value.number not in self.values:
                self._tell("value", value.number, messages.parts_of(value.get()))
                self.values.add(value.number)
        self.running[closure.number] = closure
        flags = FLAG_KEEP if keep else 0
        messages.send(
            self.socket,
            messages.run(closure.number, closure.attempt, low_water, closure.function, closure.parts, flags),
        )

    def _tell(self, method: str, number: int, parts: Sequence[Any]) -> None:
        messages.send(self.socket, messages.call({"method": method, "number": number}, parts))
