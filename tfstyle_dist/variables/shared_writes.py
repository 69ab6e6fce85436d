"""Central storage: notices when several replicas write to the one copy of a parameter in their steps.

A step that writes to parameters itself, as sharpness-aware optimizers and running averages of weights do, would do it
once for each replica. A write that leaves the parameter as the first replica's did, such as a limit to its values, is
good.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tfstyle_dist.core import torch_internals


class SharedWrites:
    """The parameters of which there is one copy."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._calls: dict[int, int] = {}  # of each replica: how many calls it has made that all make
        self._written: dict[
            tuple[int, int], tuple[int, torch.Tensor]
        ] = {}  # by call and place: who wrote it first, and what

    def begin(self) -> None:
        """A run begins: nobody has written anything in it."""
        self._calls.clear()
        self._written.clear()

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """What was written until now is not what the replica whose turn begins has done."""
        self._versions = list(map(torch_internals.version_of, parameters))

    def compare(self, replica: int, parameters: Sequence[torch.Tensor]) -> None:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.
            parameters: as ``note`` got them, and those that came since.

        Raises:
            RuntimeError: it has changed what another replica had written between the same two calls.
        """
        call = self._calls[replica] = self._calls.get(replica, 0) + 1
        before, self._versions = self._versions, list(map(torch_internals.version_of, parameters))
        if before == self._versions:
            return
        for place, (was, now) in enumerate(zip(before, self._versions, strict=False)):
            if was == now:
                continue
            parameter = parameters[place].detach()
            first, value = self._written.get((call, place), (replica, None))
            if value is None:
                self._written[call, place] = replica, parameter.clone()
            elif first != replica and not _same(parameter, value):
                raise RuntimeError(_said(parameter, first, replica))


def _said(parameter: torch.Tensor, first: int, then: int) -> str:
    return (
        f"A parameter of shape {tuple(parameter.shape)} was written to by replica {first} and then by replica {then} in "
        "one call of strategy.run, and the second write changed it again. Under central storage there is one copy of the "
        "parameters for all replicas, so what each of them writes is written once per replica. Write to it in "
        "merge_call or after strategy.run(...), or use MirroredStrategy, where each replica has its own parameters."
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
