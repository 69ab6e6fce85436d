"""How workers find out that they are about to make different calls."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from tfstyle_dist.comm.collectives.operations import Operations, call_site, name_of
from tfstyle_dist.comm.host_memory.host_memory import HostMemory
from tfstyle_dist.core import env
from tfstyle_dist.core.errors import CollectiveMismatchError

_PLACE = " at "  # between what a worker does and where
Gather = Callable[[torch.Tensor, str], Sequence[torch.Tensor]]
"""Collects tensors of one size from all workers in rank order; told a name for messages."""


class Comparison:
    """Compares the workers' calls, and collects values whose sizes differ.

    Every message of this kind has the same size, so workers that make different calls still understand each other.

    Args:
        operations: the group's.
        gather: collects tensors of one size.

    Attributes:
        memory: what all workers share, if they can.
    """

    def __init__(self, operations: Operations, gather: Gather) -> None:
        self._operations, self._gather = operations, gather
        self.memory: HostMemory | None = None
        # Gloo ends the process when sizes disagree, and NCCL when somebody does not come, so what is about to run is
        # compared first, between the hosts: no GPU's stream is stopped by it.
        self._debug = env.debug_collectives()
        self._agreed = ""

    def agree(self, signature: str, name: str) -> None:
        """See ``WorkerGroup``: one small exchange; the full texts travel only when they differ."""
        self.exchange(f"{name} {signature}", name)
        self._agreed = name

    def before(self, name: str, buffer: torch.Tensor, more: str = "", agreed: bool = False) -> None:
        """Compares a call that is about to move a buffer, unless the workers have agreed on it.

        Args:
            name: of the call.
            buffer: what is moved.
            more: what else must be the same.
            agreed: the caller knows that all make the same call.
        """
        if self._debug or not (agreed or self._has_agreed(name)):
            # What is on a GPU travels by its library, which would wait for ever for a worker whose value is on the CPU.
            where = "" if buffer.device.type == "cpu" else f" on {buffer.device.type}"
            self.exchange(f"{name} ({buffer.numel()} x {name_of(buffer.dtype)}{where}{more})", name)

    def exchange(self, text: str, name: str, number: int = 0) -> list[int]:
        """Compares ``text`` over the workers; returns the ``number`` of each.

        Raises:
            CollectiveMismatchError: the texts differ.
        """
        self._agreed = ""
        digest = digest_of(text)
        if self.memory is not None:
            same, numbers = self.memory.compare(digest, number, name)
        else:
            mine = torch.tensor([digest, number], dtype=torch.int64, device="cpu")
            pairs = [other.tolist() for other in self._gather(mine, name)]
            same, numbers = all(other == digest for other, _ in pairs), [n for _, n in pairs]
        if not same:
            self.raise_mismatch(text, name)
        return numbers

    def raise_mismatch(self, text: str, name: str) -> NoReturn:
        """Tells what each worker does: all workers see the difference, so all of them come here."""
        raise mismatch(self._calls(text, name))

    def confirm(self, text: str, name: str) -> None:
        """After a difference that may be right: all workers see it, and come here or to ``raise_mismatch``.

        Raises:
            CollectiveMismatchError: not all of them mean ``text``.
        """
        calls = self._calls(text, name)
        if not all(call.startswith(text + _PLACE) for call in calls):
            raise mismatch(calls)

    def _calls(self, text: str, name: str) -> list[str]:
        data = self._bytes(f"{text}{_PLACE}{call_site()}, operation {self._operations.sequence}")
        size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
        return self._texts(data, [int(s) for s in self._gather(size, name)], name)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """See ``WorkerGroup``: JSON text, so that nothing a peer sends is ever executed."""
        data = self._bytes(json.dumps(value))
        sizes = self.exchange(f"gather objects: {name}", name, data.numel())
        return [json.loads(text) for text in self._texts(data, sizes, name)]

    def _has_agreed(self, name: str) -> bool:
        """Whether ``agree`` was called for ``name``, or for all of ``name[0]``, ``name[1]``, ..., just before."""
        return bool(self._agreed) and name.partition("[")[0] == self._agreed

    def _bytes(self, text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def _texts(self, data: torch.Tensor, sizes: Sequence[int], name: str) -> list[str]:
        """The texts of all workers, of known sizes; shorter ones travel with zeros after them."""
        padded = data.new_zeros(max(sizes))
        padded[: data.numel()] = data
        parts = self._gather(padded, name)
        return [bytes(part[:size].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]


@functools.lru_cache(maxsize=1024)
def digest_of(text: str) -> int:
    """A number that stands for a text, 0 to 2**56."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def mismatch(calls: Sequence[str]) -> CollectiveMismatchError:
    """The error that shows what each worker does."""
    lines = "\n".join(f"  worker {r}: {_shortened(call)}" for r, call in enumerate(calls))
    return CollectiveMismatchError(
        f"The workers make different calls; all must make the same calls in the same order:\n{lines}", calls
    )


def _shortened(text: str, most: int = 400) -> str:
    """``text`` with its middle left out when it is long; the call site at its end stays."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
