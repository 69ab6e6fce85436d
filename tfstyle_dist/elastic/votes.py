"""What a vote says: the results of a worker's replicas, what each has of its own, and which batch it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.elastic.leaves import Reader, describe
from tfstyle_dist.elastic.packets import Packet
from tfstyle_dist.elastic.replica_state import Known, ReplicaStates
from tfstyle_dist.values import PerReplica

Call = list[Any]
"""The name of a step function, and a small number of its batch."""


class Votes:
    """Makes this worker's votes, and takes from all workers' votes what the next step needs.

    Args:
        states: what each replica has of its own.
        me: this worker's number.
        replicas: R.

    Attributes:
        known: the newest of each value that a replica has of its own, by replica.
    """

    def __init__(self, states: ReplicaStates, me: int, replicas: int) -> None:
        self._states, self._me, self._replicas = states, me, replicas
        self.known: dict[int, Known] = {}

    def make(
        self, held: Sequence[int], results: Sequence[Any], arguments: Any, optimizers: Iterable[torch.optim.Optimizer]
    ) -> Packet:
        """This worker's vote.

        Args:
            held: its replicas.
            results: theirs.
            arguments: of the step.
            optimizers: whose settings must be the same everywhere.

        Raises:
            TypeError: a result cannot be sent.
        """
        replicas, tensors = {}, []
        for replica, result in zip(held, results, strict=True):
            leaves, _ = nest.flatten(result)
            what, sent = describe(leaves)
            if any(entry[0] == "o" for entry in what):
                strange = next(type(leaf).__name__ for leaf, entry in zip(leaves, what, strict=True) if entry[0] == "o")
                raise TypeError(
                    f"A function that strategy.run was given returned a {strange}. In an elastic job every worker gets "
                    "the results of all replicas, so a step returns tensors, numbers, text, None, or nests of them."
                )
            states, state_tensors = self._states.changed(replica)
            replicas[str(replica)] = [what, states]
            tensors += [*sent, *state_tensors]
        header = {"replicas": replicas, "batch": fingerprint(arguments), "settings": _settings(optimizers)}
        return Packet(header, tensors)

    def take(self, votes: dict[int, Packet], results: Sequence[Any], held: Sequence[int]) -> list[Any]:
        """The results of all replicas; what each has of its own is kept.

        Args:
            votes: of all members.
            results: of this worker's replicas.
            held: these.

        Raises:
            InvalidArgumentError: the workers do not do the same.
        """
        _check_same(votes)
        mine, spec = nest.flatten(results[0])
        found: list[Any] = [None] * self._replicas
        for member, packet in votes.items():
            reader = Reader(packet.tensors)
            for name, (what, states) in packet.header["replicas"].items():
                replica = int(name)
                leaves = reader.leaves(what, mine, "results of run")
                here = member == self._me
                found[replica] = results[held.index(replica)] if here else nest.unflatten(leaves, spec)
                tensors = [reader.tensor() for _ in range(count_tensors(states))]
                self._remember(replica, states, tensors)
                if not here:
                    self._states.install(replica, states, Reader(tensors))
        return found

    def _remember(self, replica: int, states: list[Any], tensors: list[torch.Tensor]) -> None:
        """Keeps the newest of each value, for the time when the replica's objects are made anew from another's."""
        known = {tuple(entry[0][:3]): entry for entry in self.known.get(replica, [])}
        reader = Reader(tensors)
        for state in states:
            own = [reader.tensor().clone() for _ in range(count_tensors([state]))]
            known[tuple(state[:3])] = (state, own)
        self.known[replica] = list(known.values())

    def renew(self) -> None:
        """What the program has written between two steps, such as a metric that begins anew, counts from now on."""
        self.known = {replica: self._states.now(replica, entries) for replica, entries in self.known.items()}

    def install_known(self) -> None:
        """Gives each replica what it has of its own."""
        for replica in range(self._replicas):
            for state, tensors in self.known.get(replica, []):
                self._states.install(replica, [state], Reader(tensors))


def _check_same(votes: dict[int, Packet]) -> None:
    for name, advice in _ADVICE.items():
        prints = {member: packet.header[name] for member, packet in votes.items()}
        if len(set(prints.values())) > 1:
            raise InvalidArgumentError(f"{advice[0]} (fingerprints by worker: {prints}). {advice[1]}")


_ADVICE = {
    "batch": (
        "The workers gave strategy.run different batches",
        "In an elastic job every worker reads the whole global batch, so the dataset must yield the same batches in "
        "the same order everywhere: use strategy.experimental_distribute_dataset, which shuffles alike on all workers, "
        "or seed the shuffling.",
    ),
    "settings": (
        "The optimizers of the workers have different settings (learning rate, momentum, ...)",
        "Set them alike on all workers. A scheduler that no function given to strategy.run uses must be given to "
        "tfd.experimental.join, or a worker that comes back begins with a new one.",
    ),
}


def count_tensors(states: Sequence[Any]) -> int:
    """How many tensors descriptions of states take."""
    return sum({"t": 1, "s": 2}.get(entry[0], 0) for state in states for entry in state[3])


def fingerprint(arguments: Any) -> int:
    """A small number of the batch: its sizes, and the first numbers of each replica's tensors."""
    digest = hashlib.blake2b(digest_size=6)
    for leaf in nest.flatten(arguments)[0]:
        for value in leaf.values if isinstance(leaf, PerReplica) else ():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
                digest.update(str(tuple(value.shape)).encode())
                digest.update(bytes_of(value.detach().reshape(-1)[:64]).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """A small number of the numbers in the groups of optimizers."""
    found = [
        [name, float(value)]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    ]
    return int.from_bytes(hashlib.blake2b(json.dumps(found).encode(), digest_size=6).digest(), "big")
