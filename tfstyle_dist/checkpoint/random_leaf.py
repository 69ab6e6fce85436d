"""The random number generators of a worker, and the streams of its replicas, in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfstyle_dist.checkpoint import codec
from tfstyle_dist.checkpoint.codec import Put
from tfstyle_dist.checkpoint.leaves import Leaf, Read, all_of
from tfstyle_dist.checkpoint.optimizer_leaves import ParameterNames
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.runtime.random_streams import RandomStreams
from tfstyle_dist.strategies.contexts import get_strategy, has_strategy
from tfstyle_dist.variables import find_record

_REPLICAS = "replicas"


class RandomStateLeaf(Leaf):
    """A ``RandomState``: each worker saves its own, with the streams of its replicas if they were seeded."""

    kind = "random_state"
    per_worker = True

    def __init__(self, path: str, target: Any, names: ParameterNames) -> None:
        super().__init__(path, target)
        self._streams = _streams_of(names.leaves)

    def encode(self, put: Put) -> Any:
        kept = None if self._streams is None else self._streams.kept()
        return codec.encode({**self.target.state_dict(), **({_REPLICAS: kept} if kept else {})}, self.path, put)

    def load(self, tree: Any, read: Read) -> None:
        """See ``Leaf``; ``tree`` has the states of all workers that there were."""
        get = all_of(tree, read)
        states = {int(worker): codec.decode(state, get) for worker, state in tree.items()}
        self.target.load_states(states, self.worker)
        kept = states.get(self.worker, {}).get(_REPLICAS) or _of_the_job(states)
        if kept is None:
            return
        if self._streams is not None and self._streams.takes(kept):
            self._streams.put_back(kept)
            return
        here = 1 if self._streams is None else len(self._streams)
        if "torch" in kept and len(kept["torch"]) != here:
            what = f"of {len(kept['torch'])} replicas for this worker, which has {here} now: its first replica goes on"
            what += " where it was, the others do not"
        else:
            what = "that an elastic job and a job that is not elastic make in different ways: they do not go on"
        warn_once(
            "random streams of another number of replicas",
            f"The checkpoint has seeded random streams {what}. Call strategy.seed_replicas after the restore to begin "
            "streams of a known seed.",
        )


def _of_the_job(states: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What makes the numbers of an elastic job: one worker has written it for all."""
    kept = states.get(0, {}).get(_REPLICAS)
    return kept if kept is not None and "root" in kept else None


def _streams_of(leaves: Sequence[Leaf]) -> RandomStreams | None:
    """The streams of the strategy in force, or of the one that owns the objects; None where a process is a replica."""
    if has_strategy():
        contents = get_strategy().parameter_store.contents
        return None if contents is None else contents.random
    for leaf in leaves:
        for tensor in leaf.tensors():
            record = find_record(tensor)
            if record is not None:
                contents = record.store.contents
                return None if contents is None else contents.random
    return None
