"""The one interface to the other workers: a group of processes that work in step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from tfstyle_dist.comm.collectives.flat import Flat
from tfstyle_dist.comm.host_memory.compiled_sums import FindSum, nothing_compiled
from tfstyle_dist.core.enums import AggregationMethod


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Returns when the buffer holds the result.

        Raises:
            PeerLostError: another worker is gone.
            DeadlineExceededError: the deadline passed; the message names the absent workers.
        """

    def moving(self) -> bool:
        """Whether values are on their way right now, while the caller does something else."""


class Done:
    """A ``Pending`` that is already done."""

    def wait(self) -> None:
        """Returns at once."""

    def moving(self) -> bool:
        """Nothing is."""
        return False


SumInto = Callable[[Sequence[torch.Tensor], torch.Tensor, int], None]


class WorkerGroup(abc.ABC):
    """W worker processes, each with a rank; all operations work on flat, contiguous buffers.

    Every operation must be called by all members in the same order. Every wait ends at the group's timeout with an
    error that names the absent workers, the operation, its size and the call site.

    Attributes:
        rank: this worker's number.
        size: number of workers W.
        timeout: limit of each wait, ``None`` for none.
        leads: whether this worker is the one of its replica that prints and writes files.
        traces: whether operations are compiled with the program around them, which must be the same on all workers.
        one_writes: whether every worker holds all of the state, and one writes checkpoints for all.
    """

    traces: bool = False
    one_writes: bool = False
    leads: bool = True
    rank: int = 0
    size: int = 1
    timeout: timedelta | None = None

    def use_summation(self, sum_into: SumInto, find_sum: FindSum = nothing_compiled) -> None:
        """Says how this group adds tensors where it does so itself; the layers above own the summation.

        Args:
            sum_into: writes the sum of some tensors into another one, in the order of an ``AggregationMethod``.
            find_sum: finds the compiled form of sums in shared memory.
        """
        return

    @property
    def everyone(self) -> WorkerGroup:
        """All processes: more than this group's workers where several hold the parts of one replica."""
        return self

    @property
    def alone(self) -> bool:
        """Whether there is no other process, not even one that holds another part of the same replica."""
        return self.everyone.size == 1

    @property
    def own_number(self) -> int:
        """What tells this worker from the others, also where ``rank`` is the same on all because each holds it all."""
        return self.rank

    @abc.abstractmethod
    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        """Starts replacing ``buffer`` by the sum over all workers.

        Args:
            buffer: flat and contiguous; not to be touched before ``wait`` returns.
            name: for messages.
            agreed: the caller has made sure that all workers send the same number of elements.
            method: an ``AggregationMethod``: the order in which the workers' buffers are added; ``DEFAULT`` takes the
                fastest way, and gives the same bits on every worker and every run.
        """

    def all_reduce(self, buffer: torch.Tensor, name: str, method: int = AggregationMethod.DEFAULT) -> None:
        """Replaces ``buffer`` by the sum over all workers."""
        self.all_reduce_async(buffer, name, method=method).wait()

    def shares_memory(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether sums of such values go through memory that all workers share: nothing is gained by sending early."""
        return False

    def backend_of(self, device: torch.device) -> str:
        """What moves values of a device: the kind of accelerator whose library does, or ``"cpu"``.

        Workers that gave one value to different libraries would wait for each other for ever.
        """
        return "cpu"

    def all_reduce_flat(self, values: Flat, name: str, method: int = AggregationMethod.DEFAULT) -> None:
        """Replaces values on the CPU, wherever they live, by their sum over all workers."""
        buffer = torch.empty(values.numel, dtype=values.dtype, device="cpu")
        values.read(0, values.numel, buffer)
        self.all_reduce(buffer, name, method)
        values.write(0, values.numel, [buffer], _copy)

    def all_reduce_variant(self, values: Flat, name: str, method: int, variant: int, call: str) -> bool:
        """As ``all_reduce_flat``, if all workers mean the same variant of a call.

        Args:
            values: as there; how many they are may depend on the variant.
            name: for messages.
            method: an ``AggregationMethod``.
            variant: 0 to 2**56.
            call: what all workers must be about to do.

        Returns:
            Whether all workers gave the same variant; else no value was touched.

        Raises:
            CollectiveMismatchError: a worker makes another call.
        """
        if len(set(self.numbers(variant, call))) > 1:
            return False
        self.all_reduce_flat(values, name, method)
        return True

    @property
    def waited(self) -> float:
        """Seconds that this worker has waited for others in sums through shared memory, in all."""
        return 0.0

    def explain(self, numel: int, dtype: torch.dtype, method: int = AggregationMethod.DEFAULT) -> str:
        """Says which way a sum over the workers takes, and why.

        Args:
            numel: number of elements.
            dtype: their type.
            method: an ``AggregationMethod``.
        """
        return f"{self.size} worker(s): {type(self).__name__} decides"

    @abc.abstractmethod
    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        """The buffers of all workers in rank order; all of the same size."""

    def numbers(self, number: int, name: str) -> list[int]:
        """One number of each worker in rank order, 0 to 2**62; ``name`` must be the same on all."""
        return [int(n) for n in self.all_gather(torch.tensor([number], device="cpu"), name)]

    @abc.abstractmethod
    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """Replaces ``buffer`` by that of worker ``source``."""

    def broadcast_part(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """``broadcast`` of this worker's part of something that is divided over workers."""
        self.broadcast(buffer, source, name)

    @abc.abstractmethod
    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """The JSON-able values of all workers in rank order."""

    def agree(self, signature: str, name: str) -> None:
        """Checks that all workers are about to make the same call.

        Args:
            signature: what must be the same.
            name: of the call.

        Raises:
            CollectiveMismatchError: they are not; the message shows what each worker does.
        """
        return

    @abc.abstractmethod
    def report_failure(self, reason: str) -> None:
        """Leaves word for the others why this worker is about to leave."""

    @abc.abstractmethod
    def errored(self) -> Exception | None:
        """The error that broke the group, if any."""

    @abc.abstractmethod
    def members(self) -> Sequence[str]:
        """What is known of each worker, by rank."""

    def neighbours(self) -> Sequence[int]:
        """The ranks of this worker's host, in order; this worker's own is among them."""
        return (self.rank,)

    @abc.abstractmethod
    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        """The subgroup of ``ranks`` that holds this worker; all members call it with the same lists."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Gives the group up: pending and later operations fail at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what the group holds."""


def _copy(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    out.copy_(parts[0])
