"""Small steps of their own, outside of ``run``: first values, flags, what a checkpoint tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice

import torch

from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.errors import CollectiveMismatchError, InvalidArgumentError
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership.membership import Membership, MembershipChanged
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.variables.record import Record, raw
from tfstyle_dist.variables.store import ParameterStore

_MOST_WORDS = 8


class Agreements:
    """What all workers agree on, and all that live on know.

    Args:
        membership: the other workers.
        store: what the strategy owns.
        is_new: whether this worker has come back and has not begun its first step, which is the only call that the
            others wait in for it.
    """

    def __init__(self, membership: Membership, store: ParameterStore, is_new: Callable[[], bool]) -> None:
        self._membership, self._store, self._is_new = membership, store, is_new

    def make_equal(self, pending: Sequence[Record]) -> None:
        """Gives all workers the lowest one's values of what was created since; a step of its own."""
        if self._membership.came_back and not self._membership.is_member:
            return  # they come with the state
        if current_replica() is not None:
            raise NotImplementedError(
                f"{self._store.names_of(pending)} came into being inside strategy.run (a lazy module, or a Variable). "
                "In an elastic job create modules and variables in strategy.scope() before; run a lazy module once on "
                "an example there."
            )
        assert self._store.contents is not None
        first = self._store.contents.first
        shapes = [
            [r.kind, r.local_name, list(r.components[first].shape), str(r.components[first].dtype)] for r in pending
        ]

        def mine(lowest: bool) -> Packet:
            with raw():
                values = [r.components[first].detach() for r in pending] if lowest else []
                sparse = [sparse_parts.about(v) if sparse_parts.is_sparse(v) else None for v in values]
                parts = [sparse_parts.parts_of(v) if s else [v] for v, s in zip(values, sparse, strict=True)]
                return Packet({"shapes": shapes, "sparse": sparse}, list(chain.from_iterable(parts)))

        came = self.agree("first values", mine)
        for member, packet in came.items():
            if packet.header["shapes"] != shapes:
                raise CollectiveMismatchError(
                    f"The workers built different models: worker {self._membership.me} made {shapes[:_MOST_WORDS]}, "
                    f"worker {member} made {packet.header['shapes'][:_MOST_WORDS]} (of {len(shapes)} and "
                    f"{len(packet.header['shapes'])}). Build the same model on every worker."
                )
        lowest = came[min(came)]
        parts = iter(lowest.tensors)
        with torch.no_grad(), raw():
            for record, sparse in zip(pending, lowest.header["sparse"], strict=True):
                if sparse is None:
                    value = next(parts)
                else:
                    value = sparse_parts.assemble(sparse, list(islice(parts, sparse_parts.count(sparse))))
                for component in list(record.components) if record.kind == "variable" else [record.components[first]]:
                    sparse_parts.fill(component, value)

    def any_of(self, flag: bool) -> bool:
        """Whether a worker says so; a step of its own. The others have passed that before a newcomer's first step."""
        if self._is_new():
            return False
        came = self.agree("should_stop", lambda lowest: Packet({"flag": flag}))
        return any(packet.header["flag"] for packet in came.values())

    def agree(self, kind: str, mine: Callable[[bool], Packet]) -> dict[int, Packet]:
        """What all workers say, the same on all that live on.

        Args:
            kind: what the call is.
            mine: gives this worker's part; called with whether it is the lowest.

        Raises:
            InvalidArgumentError: this worker has come back, and the others are in ``run``.
        """
        if self._is_new():
            raise InvalidArgumentError(
                f"This worker came back to an elastic job, and before its first strategy.run it makes a call that all "
                f"workers must make together ({kind}); the others are in strategy.run. Between "
                "tfd.experimental.join(strategy) and the first strategy.run make no Variable, module or dataset, and "
                "save no checkpoint: do it before join, or after a step."
            )
        while True:
            view = self._membership.view()
            try:
                came = self._membership.gather(kind, mine(view.epoch.members[0] == self._membership.me))
                self._membership.commit(Packet({"replicas": {}, "call": kind, "settings": {}}))
                return came
            except MembershipChanged:
                if self._membership.view().step > view.step:
                    return came  # all had voted, so this worker too, after it had all parts
