"""What a vote says: the results of a worker's replicas, what each has of its own, and which batch it was.

A vote is about a step: ``membership.commit`` casts it, ``protocol`` counts. Who is lost is not voted on: each worker
decides it for itself (``failure_detector``, ``connection_loop``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.elastic.connections.packets import JSON_TYPES, Packet
from tfstyle_dist.elastic.state.replica_state import Known, ReplicaStates, count_tensors, place_of
from tfstyle_dist.elastic.steps.serialized_leaves import LeafReader, describe
from tfstyle_dist.values import PerReplica
from tfstyle_dist.variables.content.contents import ReplicaContents
from tfstyle_dist.variables.replicated import Replicated

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
        since: the step in which this worker came in; 0: it was there from the beginning.
    """

    def __init__(self, states: ReplicaStates, me: int, replicas: int) -> None:
        self._states, self._me, self._replicas = states, me, replicas
        self.since = 0
        self.known: dict[int, Known] = {}

    def make(
        self,
        held: Sequence[int],
        results: Sequence[Any],
        call: Call,
        settings: Mapping[str, Iterable[Mapping[str, Any]]],
    ) -> Packet:
        """This worker's vote.

        Args:
            held: its replicas.
            results: theirs.
            call: the step.
            settings: of optimizers, by what is the same name everywhere: what the groups of each hold.

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
            states = self._states.changed(replica)
            replicas[str(replica)] = [what, [state for state, _ in states]]
            tensors += [*sent, *(tensor for _, own in states for tensor in own)]
        header = {
            "replicas": replicas,
            "call": said(call),
            "settings": {name: _numbers_in(groups) for name, groups in settings.items()},
            "since": self.since,
        }
        return Packet(header, [tensor.clone() for tensor in tensors])  # a vote may be sent again when more was written

    def take(self, votes: dict[int, Packet], results: Sequence[Any], held: Sequence[int]) -> list[Any]:
        """The results of all replicas; what each has of its own is kept.

        Args:
            votes: of all members.
            results: of this worker's replicas.
            held: these.

        Raises:
            InvalidArgumentError: the workers do not do the same.
        """
        self._check_same(votes)
        mine, spec = nest.flatten(results[0])
        found: list[Any] = [None] * self._replicas
        for member, packet in votes.items():
            reader = LeafReader(packet.tensors)
            for name, (what, states) in packet.header["replicas"].items():
                replica = int(name)
                leaves = reader.leaves(what, mine, "results of run")
                here = member == self._me
                found[replica] = results[held.index(replica)] if here else nest.unflatten(leaves, spec)
                came = [(state, [reader.tensor() for _ in range(count_tensors(state))]) for state in states]
                self._remember(replica, [(state, [tensor.clone() for tensor in own]) for state, own in came])
                if not here:
                    self._states.install(replica, came)
        self._complete()
        return found

    def _check_same(self, votes: dict[int, Packet]) -> None:
        for name, (what, advice) in _ADVICE.items():
            prints = {member: packet.header[name] for member, packet in votes.items()}
            if name == "settings":  # an optimizer that nobody uses any more may be gone on some workers only
                common = sorted(set.intersection(*(set(own) for own in prints.values())))
                prints = {member: _small_number([own[number] for number in common]) for member, own in prints.items()}
            if name == "settings" and prints[self._me] == _right_one(prints, votes):
                continue  # the gradients are good: those that differ leave
            if len(set(prints.values())) > 1:
                raise InvalidArgumentError(f"{what} (by worker: {prints}). {advice}")

    def _remember(self, replica: int, states: Known) -> None:
        """Keeps the newest of each value, for the time when the replica's objects are made anew from another's."""
        known = {place_of(state): (state, own) for state, own in [*self.known.get(replica, []), *states]}
        self.known[replica] = list(known.values())

    def _complete(self) -> None:
        """What one replica has changed, and another one has not, is the other one's own too."""
        places = {r: {place_of(state) for state, _ in self.known.get(r, [])} for r in range(self._replicas)}
        everywhere = dict.fromkeys(place_of(state) for known in self.known.values() for state, _ in known)
        for replica, own in places.items():
            if missing := [place for place in everywhere if place not in own]:
                self._remember(replica, self._states.now(replica, missing))

    def renew(self) -> None:
        """What the program has written between two steps, such as a metric that begins anew, counts from now on."""
        for replica, known in self.known.items():
            self.known[replica] = self._states.now(replica, [place_of(state) for state, _ in known])

    def install_known(self) -> None:
        """Gives each replica what it has of its own."""
        for replica, known in self.known.items():
            self._states.install(replica, known)


def _right_one(prints: Mapping[int, int], votes: Mapping[int, Packet]) -> int | None:
    """What most of those have that are there longest; ``None`` if there is no such thing.

    Those that came in later decide only between as many on both sides: their programs began at the top.
    """
    first = min(packet.header["since"] for packet in votes.values())
    longest = [prints[member] for member, packet in votes.items() if packet.header["since"] == first]
    everyone = [found for found in prints.values() if found in longest]
    return _most(longest) if _most(longest) is not None else _most(everyone)


def _most(prints: Sequence[int]) -> int | None:
    """What more than half of them are."""
    return next((found for found in set(prints) if 2 * prints.count(found) > len(prints)), None)


_ADVICE = {
    "call": (
        "The workers made different calls of strategy.run: another function, another batch or other arguments",
        "In an elastic job every worker reads the whole global batch, so the dataset must yield the same batches in "
        "the same order everywhere: use strategy.experimental_distribute_dataset, which shuffles alike on all workers, "
        "or seed the shuffling. Numbers among the arguments, such as that of the epoch, must be the same: keep them "
        "in tfd.Variables.",
    ),
    "settings": (
        "The optimizers of the workers have different settings (learning rate, momentum, ...)",
        "Set them alike on all workers. A scheduler that no function given to strategy.run uses must be given to "
        "tfd.experimental.join, or a worker that comes back begins with a new one; and what a rate is computed from "
        "(the epoch, the step) belongs in a tfd.Variable.",
    ),
}


def fingerprint(arguments: Any) -> int:
    """A small number of the batch: its numbers and texts, and of each tensor its sizes and some 64 of its elements."""
    digest = hashlib.blake2b(digest_size=6)
    for leaf in nest.flatten(arguments)[0]:
        for value in leaf.values if isinstance(leaf, PerReplica) else (leaf,):
            if isinstance(value, Replicated):  # such as a Variable: the same on all workers
                continue
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
                flat = value.detach().reshape(-1)
                digest.update(str(tuple(value.shape)).encode())
                digest.update(bytes_of(flat[:: max(1, len(flat) // 64)]).numpy().tobytes())
            elif type(value) in JSON_TYPES:
                digest.update(repr(value).encode())
    return int.from_bytes(digest.digest(), "big")


def said(call: Call) -> str:
    """A call, for messages."""
    return f"{call[0]} with batch {call[1]}"


def settings_of(contents: ReplicaContents) -> dict[str, Iterable[Mapping[str, Any]]]:
    """What optimizers are set to; a wrapper of one may have no groups."""
    optimizers = [(thing, c.number) for thing, c in contents.objects() if isinstance(thing, torch.optim.Optimizer)]
    found = {str(number): getattr(thing, "param_groups", ()) for thing, number in optimizers}
    common = () if contents.common is None else contents.common.living()
    return {**found, **{f"common {number}": [thing.settings()] for number, thing in common}}


def _numbers_in(groups: Iterable[Mapping[str, Any]]) -> int:
    """A small number of the numbers in the groups of an optimizer."""
    found = [
        [name, [float(number) for number in (value if isinstance(value, tuple) else (value,))]]
        for group in groups
        for name, value in group.items()
        if all(map(_is_number, value if isinstance(value, tuple) else (value,)))
    ]
    return _small_number(found)


def _small_number(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=6).digest(), "big")


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
