"""Process groups of ``torch.distributed`` that the program, or an engine such as Ray, has made.

The ranks, the store, the backend and the limit of a wait are the group's. What is sent goes through a group of our own
beside it, of the same members, so that it cannot meet what the program sends. The program's group is never destroyed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tfstyle_dist.comm.options import CommunicationImplementation, CommunicationOptions
from tfstyle_dist.comm.rendezvous.members import Members
from tfstyle_dist.comm.torch_transport import group_among, torch_limit
from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.devices import is_accelerator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup


@dataclass(frozen=True)
class AdoptedGroup:
    """A process group that is there already.

    Attributes:
        process_group: the group.
        ranks: its members, in the numbers of the default group.
        rank: this process's number in it.
        chosen: whether the program passed it, instead of having made it the default group.
    """

    process_group: Any
    ranks: tuple[int, ...]
    rank: int
    chosen: bool

    @property
    def size(self) -> int:
        """The number of its members."""
        return len(self.ranks)

    @property
    def limit(self) -> timedelta | None:
        """The limit of a wait with which it was made; ``None``: it does not say, or this package made it."""
        ours = _own is not None and _own() is self.process_group
        return None if ours else torch_internals.limit_of_group(self.process_group)

    def backend_for(self, device: torch.device, options: CommunicationOptions) -> str | None:
        """What our own group of its members is made with; ``None``: the options ask for something else.

        A group that cannot carry tensors of the CPU gets Gloo for them: what workers tell each other waits for no GPU.
        """
        import torch.distributed as dist

        if options.implementation is not CommunicationImplementation.AUTO:
            return None
        said = dist.get_backend_config(self.process_group)
        carriers = dict(pair.split(":") for pair in said.split(",") if ":" in pair)
        host, own = carriers.get("cpu", "gloo"), carriers.get(device.type, "gloo")
        if is_accelerator(device.type) and own != "gloo":
            return f"cpu:{host},{device.type}:{own}"
        return "gloo" if host == "gloo" else f"cpu:{host}"

    def check_members(self, members: Members | None, launched: bool) -> None:
        """Refuses a default group of other workers than the environment, or a resolver, names.

        Args:
            members: who the workers are by that; ``None``: nothing is said.
            launched: whether a launcher's variables say it.

        Raises:
            ValueError: the number of workers, or this worker's number, differs.
        """
        if members is None or self.chosen or (members.size, members.rank) == (self.size, self.rank):
            return
        if members.size != self.size:
            here = f"{self.size} worker(s)"
            there = f"WORLD_SIZE={members.size}" if launched else f"the cluster has {members.size} training task(s)"
        else:
            here = f"this process as worker {self.rank} of {self.size}"
            there = f"RANK={members.rank}" if launched else f"it is worker {members.rank} of the cluster"
        raise ValueError(
            f"torch.distributed was initialised with {here}, but {there}. Initialise it for the same workers, let the "
            "strategy do it, or, if the group is right, pass process_group=torch.distributed.group.WORLD."
        )

    def own_group(self, backend: str, timeout: timedelta | None) -> Any:
        """A new torch group of the same members, numbered alike; collective over them."""
        import torch.distributed as dist

        if self.size == dist.get_world_size():
            return dist.new_group(backend=backend, timeout=torch_limit(timeout, backend))
        return group_among(self.ranks, backend, timeout)


_own: weakref.ref[Any] | None = None  # the default group, where a strategy has made it


def remember_own(process_group: Any) -> None:
    """Says that this package has made the default group: its limit is a strategy's."""
    global _own
    _own = weakref.ref(process_group)


def adopted_group(process_group: Any = None) -> AdoptedGroup | None:
    """The group to use that is there already; ``None`` where there is none.

    Args:
        process_group: one that the program passed; ``None``: the default group of ``torch.distributed``.

    Raises:
        TypeError: it is no process group.
        ValueError: this process is no member of it, its members are not in ascending order, or it was destroyed.
    """
    import torch.distributed as dist

    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        default = dist.group.WORLD
        return AdoptedGroup(default, tuple(range(dist.get_world_size())), dist.get_rank(), False)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or process_group == dist.GroupMember.NON_GROUP_MEMBER:
        _refuse_stranger()
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a group of torch.distributed, got {process_group!r}; write e.g. "
            "torch.distributed.group.WORLD, what torch.distributed.new_group returned, or mesh.get_group('dp') of a "
            "DeviceMesh."
        )
    try:
        rank, ranks = dist.get_rank(process_group), dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError):
        raise ValueError(
            "process_group is unknown to torch.distributed, or was destroyed (destroy_process_group). Make the "
            "strategy before, or make a new group."
        ) from None
    if rank < 0:
        _refuse_stranger()
    if ranks != sorted(ranks):
        raise ValueError(
            f"The ranks of process_group are {ranks}; they must be in ascending order, as those of "
            "torch.distributed.new_group are."
        )
    return AdoptedGroup(process_group, tuple(ranks), rank, True)


def _refuse_stranger() -> NoReturn:
    raise ValueError(
        "This process is not a member of process_group. Make the strategy on the members alone, e.g. "
        "`if torch.distributed.get_rank() in ranks:`."
    )
