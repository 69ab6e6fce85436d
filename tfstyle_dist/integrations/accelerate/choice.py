"""Which strategy an accelerator uses when the script names none."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.rendezvous.bootstrap import default_process_group
from tfstyle_dist.core import launch_env
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    get_strategy,
    has_strategy,
)

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy


class _Made:
    """The strategy made for the processes of accelerate, and the process group of that time."""

    def __init__(self, strategy: Strategy) -> None:
        group = default_process_group()
        self.strategy, self.device = strategy, _name(strategy.worker.torch_device(0))
        self._group = None if group is None else weakref.ref(group)

    def is_alive(self) -> bool:
        """Whether it still serves."""
        group = default_process_group()
        same = group is None if self._group is None else self._group() is group
        return same and not self.strategy.closed


def _name(device: torch.device) -> str:
    return f"{device.type}:{device.index or 0}"


_made: _Made | None = None


def before_accelerator() -> Strategy | None:
    """The strategy that must be there before accelerate looks for processes, if there is one.

    That is the one in force, or one whose workers find each other in a way that accelerate does not know: through
    ``TF_CONFIG`` or a file.
    """
    if has_strategy():
        return get_strategy()
    if default_process_group() is not None:
        return None
    device = launch_env.accelerate_device()
    devices = None if device is None else [device]
    if launch_env.tf_config() is not None and launch_env.launch() is None:
        return _remember(MultiWorkerMirroredStrategy(devices=devices))
    if launch_env.rendezvous_file() is not None and launch_env.launch() is not None:
        return _remember(MirroredStrategy(devices))
    return None


def for_accelerator(accelerator: Any) -> Strategy:
    """The strategy in force, else one over accelerate's processes, each with its one device.

    It is made once: scripts make accelerators again and again.

    Args:
        accelerator: gives the device, and the number of this process.
    """
    if has_strategy():
        return get_strategy()
    device = _name(accelerator.device)
    if _made is not None and not _made.is_alive():
        _made.strategy.close()
    elif _made is not None and _made.device == device:
        return _made.strategy
    launch = launch_env.launch()
    several_hosts = launch is not None and launch.local_world_size != launch.world_size
    group = None
    if launch is not None and launch.rank != accelerator.process_index:
        group = default_process_group()  # accelerate's debug_launcher sets RANK=0 in each process; its group is right
    if several_hosts:
        return _remember(MultiWorkerMirroredStrategy(devices=[device], process_group=group))
    return _remember(MirroredStrategy([device], process_group=group))


def _remember(strategy: Strategy) -> Strategy:
    global _made
    _made = _Made(strategy)
    return strategy


@contextmanager
def told_to_accelerate(strategy: Strategy | None) -> Iterator[None]:
    """Inside, the environment says what accelerate must know to join the processes of ``strategy``."""
    if strategy is None or strategy.worker.group.size == 1:
        yield
        return
    group = strategy.worker.group
    here = list(group.neighbours())
    launch = launch_env.Launch(group.rank, group.size, here.index(group.rank), len(here))
    # The group exists already; accelerate only asks for an address to be there.
    with launch_env.launcher_variables_set(launch, launch_env.master_address() or ("127.0.0.1", free_ports(1)[0])):
        yield
