"""Silent corruption: every so many steps all copies of what must be equal everywhere are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership.membership import Membership, MembershipChanged
from tfstyle_dist.elastic.state.replica_state import has_own_value
from tfstyle_dist.elastic.state.tensor_numbers import TensorNumbers
from tfstyle_dist.variables.record import Living, raw
from tfstyle_dist.variables.store import ParameterStore

_MASK = (1 << 64) - 1
_WORD = 8
Digests = list[int]


class Audit:
    """Compares parameters, the state of optimizers and mirrored Variables, as they are when a step begins.

    Args:
        membership: the other workers.
        store: what the strategy owns.
        every: steps from one comparison to the next; ``None``: there is none.

    Attributes:
        found: step, worker and tensor of each difference.
    """

    def __init__(self, membership: Membership, store: ParameterStore, every: int | None) -> None:
        assert store.contents is not None
        self._membership, self._store, self._contents, self._every = membership, store, store.contents, every
        self.found: list[tuple[int, int, str]] = []

    def check(self, held: Sequence[int], runs: int) -> None:
        """Compares, if it is time; nothing of the step was computed yet.

        Args:
            held: the replicas of this worker.
            runs: calls of ``run`` before this one, on all workers alike.

        Raises:
            MembershipChanged: another worker differed and was given up.
            DataLossError: this worker differs from most others, or nobody can say who is right.
        """
        if self._every is None or runs % self._every:
            return
        self._contents.settle()
        own = {str(r): {key: digest(tensor) for key, _, tensor in self._tensors(r)} for r in held}
        came = self._membership.gather("comparison of all copies", Packet({"digests": own}))
        copies = {worker: list(packet.header["digests"].values()) for worker, packet in came.items()}
        # What nobody uses any more may be gone on some workers only.
        common = set.intersection(*(set(found) for found in chain.from_iterable(copies.values())))
        names = {key: name for key, name, _ in self._tensors(held[0]) if key in common}
        different = differing({w: [[found[key] for key in names] for found in each] for w, each in copies.items()})
        if not different:
            return
        where = {worker: list(names.values())[number] for worker, number in different.items()}
        said = ", ".join(f"worker {worker} in {name}" for worker, name in where.items())
        self.found += [(runs, worker, name) for worker, name in where.items()]
        if len(different) == len(copies):
            raise DataLossError(
                f"The copies of parameters and optimizer state differ in step {runs} ({said}), and no majority "
                "says which are right. A memory or a processor is faulty, or the program wrote to one copy. Start the "
                "job again from a checkpoint."
            )
        try:  # nobody is given up before all have what they need to know why
            self._membership.gather("who differs", Packet({}))
        except MembershipChanged:
            if self._membership.me not in different:
                raise
        if self._membership.me in different:
            raise DataLossError(
                f"Worker {self._membership.me} differs from most others in step {runs} ({said}): its memory or "
                "processor is faulty, or its program wrote to its copy alone. The others go on without it. Start it "
                "again, on another host if this happens again: it gets the state from the others."
            )
        get_logger().error("elastic: %s differs from the others in step %d: given up", said, runs)
        self._membership.expel(different)
        raise MembershipChanged(f"{said} differed")

    def _tensors(self, replica: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """A replica's copies of all that is equal everywhere, in the same order on all workers.

        Yields:
            A key that is the same on all workers, a name for messages, and the tensor.
        """
        with raw():
            records = Living(self._store.records("parameter"))
            for record in records:
                assert record.tensor is not None
                yield f"p{record.number}", record.describe(), self._contents.inside(record.tensor, replica).detach()
            names = {id(record.tensor): record.describe() for record in records}
            for thing, content in self._contents.objects():
                if isinstance(thing, torch.optim.Optimizer):
                    state = self._contents.attributes(thing, replica).get("state", {})
                    held = [p for group in getattr(thing, "param_groups", ()) for p in group["params"]]
                    for number, parameter in enumerate(held):
                        for name, value in sorted(state.get(parameter, {}).items()):
                            if isinstance(value, torch.Tensor):
                                where = names.get(id(parameter), f"parameter of optimizer {content.number}")
                                key = f"o{content.number} {number} {name}"
                                yield key, f"{type(thing).__name__} {name} of {where}", value
            yield from self._common(names)
            for record in self._store.records("variable"):
                if not has_own_value(record):
                    yield f"v{record.number}", f"Variable {record.describe()}", record.components[replica].detach()

    def _common(self, names: dict[int, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """What the replicas of a worker have in common."""
        names = {**names, **{id(r.tensor): r.describe() for r in self._store.records("variable")}}
        numbers = TensorNumbers(self._store)
        for number, thing in [] if self._contents.common is None else self._contents.common.living():
            for place, (tensor, values) in enumerate(thing.kept_by_tensor()):
                for name, value in sorted(values.items()):
                    if isinstance(value, torch.Tensor):
                        where = names.get(id(tensor), f"variable {place}")
                        key = f"c{number} {numbers.number(tensor)} {name}"
                        yield key, f"{type(thing).__name__} {name} of {where}", value


def digest(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes as 64-bit words; every change of one bit changes it."""
    if sparse_parts.is_sparse(tensor):
        whole = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return sum((2 * place + 1) * digest(part) for place, part in enumerate(sparse_parts.parts_of(whole))) & _MASK
    data = bytes_of(tensor)
    if not data.numel():
        return 0
    if data.data_ptr() % _WORD or data.storage_offset() % _WORD:
        data = data.clone()
    whole_words = data.numel() // _WORD * _WORD
    rest = int.from_bytes(bytes(data[whole_words:].tolist()), "little")
    words = int(data[:whole_words].view(torch.int64).sum()) if whole_words else 0
    return (words + rest) & _MASK


def differing(copies: dict[int, list[Digests]]) -> dict[int, int]:
    """Which workers differ, and the number of the first tensor in which each does; all of them if nobody is right.

    A worker whose own copies differ from each other is wrong for sure. Of the others most are right.

    Args:
        copies: the digests of each replica, by worker.
    """
    found = {w: _first_difference(own[0], o) for w, own in copies.items() for o in own[1:] if o != own[0]}
    whole = {worker: tuple(own[0]) for worker, own in copies.items() if worker not in found}
    if len(set(whole.values())) <= 1:
        return found
    right, count = Counter(whole.values()).most_common(1)[0]
    if 2 * count <= len(whole):
        one, other = list(set(whole.values()))[:2]
        return {**found, **dict.fromkeys(whole, _first_difference(list(one), list(other)))}
    wrong = {w: _first_difference(list(right), list(own)) for w, own in whole.items() if own != right}
    return {**found, **wrong}


def _first_difference(one: Digests, other: Digests) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
