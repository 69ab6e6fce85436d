"""What a worker that comes back gets from the others: from each a part, out of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core.errors import DataLossError, InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership.attendance import View
from tfstyle_dist.elastic.state.dataset_positions import DatasetPositions
from tfstyle_dist.elastic.state.python_random import described, state_of
from tfstyle_dist.elastic.state.replica_state import count_tensors
from tfstyle_dist.elastic.state.whole_state import WholeState
from tfstyle_dist.elastic.steps.step_random import StepRandomStreams
from tfstyle_dist.elastic.steps.votes import Call, Votes, said
from tfstyle_dist.variables.store import ParameterStore


class Handover:
    """Makes and takes the state between two steps.

    Args:
        whole: of the objects.
        votes: with what each replica has of its own.
        streams: of random numbers.
        positions: of the datasets.
        store: what the strategy owns.

    Attributes:
        random: the process' own random numbers when the last step ended.
    """

    def __init__(
        self,
        whole: WholeState,
        votes: Votes,
        streams: StepRandomStreams,
        positions: DatasetPositions,
        store: ParameterStore,
    ) -> None:
        self._whole, self._votes, self._streams, self._positions, self._store = whole, votes, streams, positions, store
        self._pending: tuple[dict[str, Any], list[torch.Tensor]] | None = None
        self.random = streams.of_process()

    # ---- the others -------------------------------------------------------------------------------------------

    def part(self, me: int, view: View, call: Call) -> Packet:
        """What this worker sends: the first of the donors all that is not tensors equal everywhere, each its share."""
        try:
            sent, tensors, equal = self._whole.describe()
        except Exception as error:  # the others are not to suffer from what cannot be sent
            return Packet({"error": f"worker {me}: {type(error).__name__}: {error}", "where": []})
        known = [[r, [state for state, _ in entries]] for r, entries in self._votes.known.items()]
        own = [t for entries in self._votes.known.values() for _, ts in entries for t in ts]
        first = len(tensors)
        tensors += [*own, self.random[0]]
        equal += [False] * (len(own) + 1)
        where = _shares(tensors, equal, len(view.donors))[view.donors.index(me)]
        header: dict[str, Any] = {"where": where, "count": len(tensors)}
        if me == view.donors[0]:
            header["state"] = {
                **sent,
                "known": known,
                "first known": first,
                "seed": [self._streams.root, self._streams.ahead],
                "python": None if self.random[1] is None else described(self.random[1]),
                "threads": torch.get_num_threads(),
                "runs": self._store.runs,
                "positions": self._positions.state(),
                "call": call,
                "step": view.step,
            }
        return Packet(header, [tensors[number] for number in where])

    @property
    def is_new(self) -> bool:
        """Whether this worker has come back and got the state, and has not begun its first step."""
        return self._pending is not None

    # ---- the worker that comes back ---------------------------------------------------------------------------

    def take(self, parts: Sequence[Packet]) -> None:
        """Puts everything where it belongs; what is found only when the first step runs is kept for then.

        Raises:
            DataLossError: a worker could not send its part.
            CollectiveMismatchError: the programs have different objects.
        """
        for part in parts:
            if "error" in part.header:
                raise DataLossError(f"The state of the training could not be sent: {part.header['error']}")
        tensors: list[Any] = [None] * parts[0].header["count"]
        for part in parts:
            for number, tensor in zip(part.header["where"], part.tensors, strict=True):
                tensors[number] = tensor
        state = next(part.header["state"] for part in parts if "state" in part.header)
        self._pending = state, tensors
        self._install(complete=False)
        self._streams.root, self._streams.ahead = state["seed"]
        use_threads(state["threads"])
        # The run that comes counts itself; the others have counted it already.
        self._store.runs = state["runs"] - 1
        self._positions.load(state["positions"])
        self.random = tensors[-1], None if state["python"] is None else state_of(state["python"])
        self._streams.of_process_again(self.random)

    def _install(self, complete: bool) -> None:
        assert self._pending is not None
        state, tensors = self._pending
        self._whole.install(state, tensors, complete)
        number = state["first known"]
        self._votes.known = {}
        for replica, entries in state["known"]:
            for entry in entries:
                count = count_tensors(entry)
                own = [t.clone() for t in tensors[number : number + count]]
                self._votes.known.setdefault(replica, []).append((entry, own))
                number += count

    def finish(self, call: Call) -> bool:
        """The first step is about to run: what the program wrote before it is put right.

        Args:
            call: what is about to run.

        Returns:
            Whether there was something to do.

        Raises:
            InvalidArgumentError: the others run something else.
        """
        if self._pending is None:
            return False
        state = self._pending[0]
        if state["call"] != call:
            raise InvalidArgumentError(
                f"This worker came back to an elastic job in step {state['step']}, where the others call "
                f"{said(state['call'])}; it calls {said(call)}. A worker that comes back begins at the top of its "
                "loop. Call tfd.experimental.join(strategy) right before the loop, keep the numbers that the loop "
                "depends on (the epoch, the step) in tfd.Variables, and take one batch for each call of strategy.run."
            )
        self._install(complete=True)
        self._pending = None
        return True


def use_threads(threads: int) -> None:
    """Makes torch's math on the CPU use as many threads as on the other workers."""
    if threads != torch.get_num_threads():
        get_logger().info("elastic: torch.set_num_threads(%d), as on the other workers", threads)
        torch.set_num_threads(threads)


def _shares(tensors: Sequence[torch.Tensor], equal: Sequence[bool], count: int) -> list[list[int]]:
    """Which tensors each of the donors sends: the first all that only it has, and about as many bytes each."""
    shares: list[list[int]] = [[] for _ in range(count)]
    bytes_of = [0] * count
    order = sorted(range(len(tensors)), key=lambda n: (equal[n], -tensors[n].nbytes))
    for number in order:
        donor = min(range(count), key=bytes_of.__getitem__) if equal[number] else 0
        shares[donor].append(number)
        bytes_of[donor] += tensors[number].nbytes
    return shares
