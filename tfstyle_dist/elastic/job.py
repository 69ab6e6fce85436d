"""An elastic job as a strategy sees it: which replicas are here, joint work with other workers, the transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.errors import CollectiveMismatchError, InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.elastic import gradient_parts
from tfstyle_dist.elastic.gradient_parts import GradientParts
from tfstyle_dist.elastic.leaves import Reader, check_same_everywhere, describe
from tfstyle_dist.elastic.membership import Membership, MembershipChanged, View
from tfstyle_dist.elastic.options import held_by
from tfstyle_dist.elastic.packets import Packet
from tfstyle_dist.elastic.replica_state import ReplicaStates
from tfstyle_dist.elastic.streams import StepStreams
from tfstyle_dist.elastic.undo import Undo
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.values import PerReplica
from tfstyle_dist.variables.record import Record, raw
from tfstyle_dist.variables.store import ParameterStore

_EXCHANGED = ("all_reduce", "gradient of all_reduce", "all_gather", "gradient of all_gather", "merge_call")
_MOST_WORDS = 8


class ElasticJob:
    """One worker's side of the steps of an elastic job.

    Args:
        membership: the other workers.
        store: what the strategy owns.
        reducer: of its gradients.
        replicas: R.

    Attributes:
        held: the replicas of this worker.
        retried: how many steps were done again.
    """

    def __init__(self, membership: Membership, store: ParameterStore, reducer: GradientReducer, replicas: int) -> None:
        assert store.contents is not None
        self.membership, self._store, self._contents, self._replicas = membership, store, store.contents, replicas
        self._parts = GradientParts(reducer)
        self._undo = Undo(self._contents, self._variables)
        self._states = ReplicaStates(self._contents, self._variables)
        self._streams = StepStreams(store.worker.devices, membership.seed)
        self._contents.use_random(self._streams)
        self._known: dict[int, list[tuple[Any, list[torch.Tensor]]]] = {}
        self.held: tuple[int, ...] = ()
        self.retried = 0
        self._epoch = membership.view().epoch
        self._hold(held_by(membership.me, self._epoch.members, replicas), moved=False)

    def _variables(self) -> Iterable[Record]:
        return self._store.records("variable")

    @property
    def is_lowest(self) -> bool:
        """Whether this is the worker with the lowest number of those that are alive."""
        return self.membership.me == self._epoch.members[0]

    # ---- the transaction --------------------------------------------------------------------------------------

    def run(self, attempt: Callable[[], list[Any]], arguments: Any) -> list[Any]:
        """Does a step until it is committed.

        Args:
            attempt: runs the replicas that are ``held`` now; returns their results.
            arguments: of the step.

        Returns:
            The results of all replicas.
        """
        process = torch.get_rng_state()
        try:
            self._undo.keep()
            while True:
                view = self._begin()
                try:
                    results = attempt()
                except MembershipChanged:
                    self._abort()
                    continue
                except BaseException:
                    self._abort()
                    raise
                committed = self._commit(view, results, arguments)
                if committed is not None:
                    return committed
        finally:
            self._streams.end_step()
            self._undo.done()
            torch.set_rng_state(process)

    def _begin(self) -> View:
        view = self.membership.view()
        if view.epoch != self._epoch:
            held = held_by(self.membership.me, view.epoch.members, self._replicas)
            get_logger().info(
                "elastic: epoch %d, workers %s, replicas %s here", view.epoch.number, view.epoch.members, held
            )
            self._epoch = view.epoch
            self._hold(held, moved=True)
            self._undo.keep()  # another replica may be the first one here now
        self._states.mark(self.held)
        self._streams.step = view.step
        self._streams.begin_step()
        return view

    def _abort(self) -> None:
        self._streams.end_step()
        self._parts.settle()
        self._undo.restore()
        self._refresh()
        self.retried += 1

    def _commit(self, view: View, results: list[Any], arguments: Any) -> list[Any] | None:
        """Votes; returns the results of all replicas, or ``None`` when the step is to be done again."""
        self._streams.end_step()
        self._parts.check_nothing_waits(self.held)
        packet = self._vote(results, arguments)
        try:
            votes = self.membership.commit(packet)
        except MembershipChanged:
            now = self.membership.view()
            if now.step == view.step:
                self._abort()
                return None
            assert now.votes is not None
            votes = now.votes
        self._check_same_batch(votes)
        return self._take_votes(votes, results)

    def _vote(self, results: list[Any], arguments: Any) -> Packet:
        replicas, tensors = {}, []
        for replica, result in zip(self.held, results, strict=True):
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
        return Packet({"replicas": replicas, "batch": _fingerprint(arguments)}, tensors)

    def _check_same_batch(self, votes: dict[int, Packet]) -> None:
        prints = {member: packet.header["batch"] for member, packet in votes.items()}
        if len(set(prints.values())) > 1:
            raise InvalidArgumentError(
                f"The workers gave strategy.run different batches (fingerprints by worker: {prints}). In an elastic "
                "job every worker reads the whole global batch, so the dataset must yield the same batches in the same "
                "order everywhere: use strategy.experimental_distribute_dataset, which shuffles alike on all workers, "
                "or seed the shuffling."
            )

    def _take_votes(self, votes: dict[int, Packet], results: list[Any]) -> list[Any]:
        mine, spec = nest.flatten(results[0])
        found: list[Any] = [None] * self._replicas
        for member, packet in votes.items():
            reader = Reader(packet.tensors)
            for name, (what, states) in packet.header["replicas"].items():
                replica = int(name)
                leaves = reader.leaves(what, mine, "results of run")
                here = member == self.membership.me
                found[replica] = results[self.held.index(replica)] if here else nest.unflatten(leaves, spec)
                tensors = [reader.tensor() for _ in range(_count(states))]
                self._remember(replica, states, tensors)
                if not here:
                    self._states.install(replica, states, Reader(tensors))
        return found

    # ---- what each replica has of its own -----------------------------------------------------------------------

    def _remember(self, replica: int, states: list[Any], tensors: list[torch.Tensor]) -> None:
        """Keeps the newest of each value, for the time when the replica's objects are made anew from another's."""
        known = {tuple(entry[0][:3]): entry for entry in self._known.get(replica, [])}
        reader = Reader(tensors)
        for state in states:
            own = [reader.tensor().clone() for _ in range(_count([state]))]
            known[tuple(state[:3])] = (state, own)
        self._known[replica] = list(known.values())

    def _refresh(self) -> None:
        """All replicas' objects are made from the first one's, and get what each has of its own."""
        self._contents.distrust()
        self._contents.enter()
        for replica in range(self._replicas):
            for state, tensors in self._known.get(replica, []):
                self._states.install(replica, [state], Reader(tensors))
        self._contents.leave()

    def _hold(self, held: Sequence[int], moved: bool) -> None:
        self.held = tuple(held)
        self._streams.held = self.held
        if moved:
            self._contents.distrust()
        self._contents.show(self.held[0])
        if moved:
            self._refresh()

    # ---- joint work -------------------------------------------------------------------------------------------

    def exchange(self, kind: str, own: dict[int, Any]) -> list[Any]:
        """See ``Exchanger``."""
        if kind == gradient_parts.KIND:
            return self._exchange_gradients(own)
        if not (kind in _EXCHANGED or " of variable " in kind):
            raise NotImplementedError(
                f"{kind} is not supported in an elastic job yet. Use a torch.optim optimizer instead of a TF-style "
                "one, and create variables in strategy.scope() before strategy.run."
            )
        first, spec = nest.flatten(next(iter(own.values())))
        packet = Packet({"replicas": {}})
        tensors: list[torch.Tensor] = []
        for replica, payload in own.items():
            leaves = nest.flatten(payload)[0]
            what, sent = describe(leaves, self._store.owns)
            check_same_everywhere(leaves, what, kind)
            packet.header["replicas"][str(replica)] = what
            tensors += sent
        packet.tensors = tensors
        found: list[Any] = [None] * self._replicas
        for member, came in self.membership.gather(kind, packet).items():
            reader = Reader(came.tensors)
            for name, what in came.header["replicas"].items():
                if member != self.membership.me:
                    found[int(name)] = nest.unflatten(reader.leaves(what, first, kind), spec)
        for replica, payload in own.items():
            found[replica] = payload
        return found

    def _exchange_gradients(self, own: dict[int, Any]) -> list[Any]:
        packet, tensors = Packet({"replicas": {}}), []
        for replica, touched in own.items():
            numbers, what, sent = self._parts.describe(replica, touched)
            packet.header["replicas"][str(replica)] = [numbers, what]
            tensors += sent
        packet.tensors = tensors
        found: list[Any] = [None] * self._replicas
        for member, came in self.membership.gather(gradient_parts.KIND, packet).items():
            reader = Reader(came.tensors)
            for name, (numbers, what) in came.header["replicas"].items():
                if member != self.membership.me:
                    found[int(name)] = self._parts.take(int(name), self.held[0], numbers, what, reader)
        for replica, touched in own.items():
            found[replica] = touched
        return found

    def settled(self, kind: str) -> None:
        """See ``Exchanger``."""
        if kind == gradient_parts.KIND:
            self._parts.settle()

    # ---- small steps of their own -----------------------------------------------------------------------------

    def make_equal(self, pending: Sequence[Record]) -> None:
        """Gives all workers the lowest one's values of what was created since; a step of its own."""
        frame = current_frame()
        if frame is not None and frame.replica is not None:
            raise NotImplementedError(
                f"{self._store.names_of(pending)} came into being inside strategy.run (a lazy module, or a Variable). "
                "In an elastic job create modules and variables in strategy.scope() before; run a lazy module once on "
                "an example there."
            )
        first = self._contents.first
        shapes = [
            [r.kind, r.local_name, list(r.components[first].shape), str(r.components[first].dtype)] for r in pending
        ]

        def mine(lowest: bool) -> Packet:
            with raw():
                return Packet({"shapes": shapes}, [r.components[first].detach() for r in pending] if lowest else [])

        came = self._agree("first values", mine)
        for member, packet in came.items():
            if packet.header["shapes"] != shapes:
                raise CollectiveMismatchError(
                    f"The workers built different models: worker {self.membership.me} made {shapes[:_MOST_WORDS]}, "
                    f"worker {member} made {packet.header['shapes'][:_MOST_WORDS]} (of {len(shapes)} and "
                    f"{len(packet.header['shapes'])}). Build the same model on every worker."
                )
        values = came[min(came)].tensors
        with torch.no_grad(), raw():
            for record, value in zip(pending, values, strict=True):
                for component in list(record.components) if record.kind == "variable" else [record.components[first]]:
                    component.copy_(value)

    def any_of(self, flag: bool) -> bool:
        """Whether a worker says so; a step of its own."""
        came = self._agree("should_stop", lambda lowest: Packet({"flag": flag}))
        return any(packet.header["flag"] for packet in came.values())

    def _agree(self, kind: str, mine: Callable[[bool], Packet]) -> dict[int, Packet]:
        """What all workers say, the same on all that live on.

        Args:
            kind: what the call is.
            mine: gives this worker's part; called with whether it is the lowest.
        """
        while True:
            view = self.membership.view()
            try:
                came = self.membership.gather(kind, mine(view.epoch.members[0] == self.membership.me))
                self.membership.commit(Packet({"replicas": {}, "batch": 0}))
                return came
            except MembershipChanged:
                if self.membership.view().step > view.step:
                    return came  # all had voted, so this worker too, after it had all parts


def _count(states: Sequence[Any]) -> int:
    """How many tensors descriptions of states take."""
    return sum({"t": 1, "s": 2}.get(entry[0], 0) for state in states for entry in state[3])


def _fingerprint(arguments: Any) -> int:
    """A small number of the batch: its sizes, and the first numbers of each replica's tensors."""
    digest = hashlib.blake2b(digest_size=6)
    for leaf in nest.flatten(arguments)[0]:
        for value in leaf.values if isinstance(leaf, PerReplica) else ():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
                digest.update(str(tuple(value.shape)).encode())
                head = value.detach().reshape(-1)[:64].contiguous()
                digest.update(head.view(torch.uint8).numpy().tobytes() if head.numel() else b"")
    return int.from_bytes(digest.digest(), "big")
