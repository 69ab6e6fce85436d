"""What a replica gives to joint work, as numbers and tensors on the way to workers that do not hold that replica.

All replicas run the same program, so a worker knows the structure of what another replica gives from its own replicas.
Tensors, numbers, text and ``None`` are sent; what is the same object on every replica (a function, a variable, a
module) is not: each worker uses its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.elastic.connections.packets import JSON_TYPES, check_can_be_sent
from tfstyle_dist.values import Division, Share, note_result, share_of_result

_SAME_EVERYWHERE = (torch.Tensor, torch.nn.Module, torch.dtype, torch.device, torch.Size, enum.Enum, type)
Described = list[list[Any]]


def describe(
    leaves: Sequence[Any], number_of: Callable[[torch.Tensor], int | None] | None = None
) -> tuple[Described, list[torch.Tensor]]:
    """Leaves as JSON-able descriptions and tensors.

    Args:
        leaves: of a nest.
        number_of: called with a tensor; the number of one that every worker has (a variable) and that is not sent.
    """
    described: Described = []
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        if type(leaf) in JSON_TYPES:
            described.append(["v", leaf])
        elif isinstance(leaf, torch.Tensor):
            if number_of is not None and (number := number_of(leaf)) is not None:
                described.append(["w", number])
                continue
            value = leaf.detach()
            if sparse_parts.is_sparse(value):
                described.append(["s", *sparse_parts.about(value)])
                tensors += sparse_parts.parts_of(value)
            elif value.layout is torch.strided and not value.is_nested:
                check_can_be_sent(value)
                described.append(["t", *_told(share_of_result(leaf))])
                tensors.append(value)
            else:
                raise TypeError(f"A tensor of layout {value.layout} cannot be sent in an elastic job; make it dense.")
        elif isinstance(leaf, Share):
            described.append(["h", *_told(leaf)])
        else:
            described.append(["o", type(leaf).__name__])
    return described, tensors


def _told(share: Share | None) -> list[Any]:
    return [] if share is None else [share.examples, None if share.division is None else list(share.division)]


def _share(examples: int, division: list[Any] | None) -> Share:
    return Share(examples, None if division is None else Division(*division))


class LeafReader:
    """Takes leaves from what came.

    Args:
        tensors: of the packet.
        with_number: gives the tensor that every worker has and that has a number.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], with_number: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        self._tensors, self._next, self._with_number = tensors, 0, with_number

    def tensor(self) -> torch.Tensor:
        """The next one."""
        self._next += 1
        return self._tensors[self._next - 1]

    def leaves(self, described: Described, own: Sequence[Any], what: str) -> list[Any]:
        """The leaves of another replica.

        Args:
            described: as ``describe`` gave it there.
            own: the leaves of a replica of this worker.
            what: names the call in an error.

        Raises:
            CollectiveMismatchError: the replicas gave different structures.
        """
        if len(described) != len(own):
            raise CollectiveMismatchError(
                f"{what}: one replica gave {len(described)} values, another one {len(own)}. Every replica must make "
                "the same calls with values of the same structure."
            )
        return [self._leaf(entry, mine) for entry, mine in zip(described, own, strict=True)]

    def _leaf(self, entry: list[Any], mine: Any) -> Any:
        if entry[0] == "o":
            return mine
        if entry[0] == "w":
            assert self._with_number is not None
            return self._with_number(entry[1])
        if entry[0] == "h":
            return _share(*entry[1:])
        if entry[0] == "v":
            same = type(entry[1]) is type(mine) and entry[1] == mine
            return mine if same else entry[1]
        if entry[0] == "t":
            tensor = self.tensor()
            if len(entry) > 1:  # what was computed of no examples is nothing here too
                note_result(tensor, _share(*entry[1:]))
            return tensor
        return sparse_parts.assemble(entry[1:], [self.tensor() for _ in range(sparse_parts.count(entry[1:]))])


def check_same_everywhere(leaves: Sequence[Any], described: Described, what: str) -> None:
    """Refuses what is neither sent nor surely the same on every worker.

    Args:
        leaves: of what a replica gives.
        described: them.
        what: names the call.

    Raises:
        TypeError: there is such a leaf.
    """
    for leaf, entry in zip(leaves, described, strict=True):
        if entry[0] == "o" and not (callable(leaf) or isinstance(leaf, _SAME_EVERYWHERE)):
            raise TypeError(
                f"{what} was given a {type(leaf).__name__}, which cannot be sent to the other workers of an elastic "
                "job. Give tensors, numbers or text."
            )
