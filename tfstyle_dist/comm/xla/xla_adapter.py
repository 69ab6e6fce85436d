"""XLA devices (TPUs, or the CPU's virtual ones) through torch_xla: the only module that imports it.

A successor of torch_xla needs another adapter only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core import launch_env

_HOW = "make venv-xla (or: pip install 'torch==2.9.0' 'torch-xla==2.9.0') gives a pair that fits"


class TorchXlaError(ImportError, ValueError):
    """There is no torch_xla for TPUs; a ``ValueError`` too, which programs catch that go on without a TPU."""


def require_torch_xla() -> None:
    """Checks that torch_xla is there and was built for this torch; nothing is imported.

    Raises:
        TorchXlaError: it is absent or does not fit; the message says what to install.
    """
    if importlib.util.find_spec("torch_xla") is None:
        raise TorchXlaError(f"TPUStrategy needs torch_xla, which is not installed; {_HOW}.", name="torch_xla")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        theirs, ours = importlib.metadata.version("torch_xla"), str(torch.__version__)
        if theirs.split(".")[:2] != ours.split(".")[:2]:
            raise TorchXlaError(
                f"torch_xla {theirs} works with torch {'.'.join(theirs.split('.')[:2])} only, but this is torch "
                f"{ours}; {_HOW}.",
                name="torch_xla",
            )


def check_launcher(world_size: int) -> None:
    """Raises ValueError when a launcher started more processes than XLA sees replicas.

    Under torchrun every process would be replica 0 of its own world, and train alone without a word.

    Args:
        world_size: replicas that XLA knows of.
    """
    launch = launch_env.launch()
    if launch is not None and launch.world_size != world_size:
        raise ValueError(
            f"WORLD_SIZE={launch.world_size}, but XLA sees {world_size} replica(s): each process would train alone. Do "
            "not start XLA programs with torchrun; call torch_xla.launch(main), which makes a process for each TPU "
            "chip, or run one process with TPUStrategy(use_spmd=True)."
        )


class XlaAdapter:
    """One thread's view of its XLA device and of the others.

    Args:
        use_spmd: one program over all devices, divided by the compiler; must come before any tensor is put on a device.
            ``None``: so if this thread stands for all of several devices, as in a program that was started by hand.

    Attributes:
        spmd: whether there is one program over all devices.
        device: where the tensors of this thread live.
        rank: number of this replica; 0 with ``spmd``.
        world_size: number of replicas; 1 with ``spmd``.
        num_devices: XLA devices of all processes.

    Raises:
        ImportError: torch_xla is absent or does not fit torch.
        ValueError: the launcher's world is another one, or the process runs in the other mode.
    """

    def __init__(self, use_spmd: bool | None = None) -> None:
        require_torch_xla()
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics
        import torch_xla.runtime as xr

        self._xla, self._xm, self._metrics = torch_xla, xm, metrics
        self.num_devices = int(xr.global_runtime_device_count())
        replicas = int(xr.world_size())
        self.spmd = use_spmd if use_spmd is not None else xr.is_spmd() or self.num_devices > replicas == 1
        if self.spmd and not xr.is_spmd():
            xr.use_spmd()
        elif not self.spmd and (xr.is_spmd() or self.num_devices > replicas == 1):
            raise ValueError(
                f"This program holds all {self.num_devices} XLA devices, but only one replica of it runs. Take "
                "use_spmd=True, or start it with torch_xla.launch(main), which runs main once for each device."
            )
        self.rank, self.world_size = (0, 1) if self.spmd else (int(xr.global_ordinal()), replicas)
        check_launcher(int(xr.process_count()) if self.spmd else self.world_size)
        self.device: torch.device = torch_xla.device()
        self._mine: torch.Tensor | None = None

    # ---- collective calls: they are traced, and run with the graph they are part of ---------------------------

    def all_reduce(self, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        """Replaces each tensor by ``scale`` times its sum over the replicas; views of others do not see it."""
        if tensors and self.world_size > 1:
            self._xm.all_reduce(self._xm.REDUCE_SUM, list(tensors), scale=scale, pin_layout=False)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All replicas' tensors, stacked in a new first dimension."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        return self._xm.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False)  # type: ignore[no-any-return]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replaces ``tensor`` by that of replica ``source``."""
        # A number that depends on the replica would be a constant of the graph, and the graphs would differ: uploaded.
        if self._mine is None:
            (self._mine,) = self._xm.send_cpu_data_to_device([torch.tensor([self.rank])], self.device)
        part = torch.where(self._mine == source, tensor, torch.zeros_like(tensor))
        self.all_reduce([part])
        tensor.copy_(part)

    # ---- running ----------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Compiles and starts what was traced."""
        self._xla.sync()

    def wait(self) -> None:
        """Waits until what was started is done."""
        self._xm.wait_device_ops()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the CPU; everything that was traced runs first, so that all replicas run the same graphs."""
        self.sync()
        return tensor.cpu()

    def num_compilations(self) -> int:
        """How many graphs this process has compiled."""
        data = self._metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    def save(self, state: Any, path: str) -> None:
        """``torch.save`` of ``state`` with its tensors on the CPU, by replica 0 alone; all replicas call it."""
        self._xm.save(state, path)

    # ---- one program over all devices -------------------------------------------------------------------------

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Any:
        """A mesh of all devices, in their order."""
        import numpy as np
        import torch_xla.distributed.spmd as xs

        return xs.Mesh(np.arange(self.num_devices), tuple(shape), tuple(names))

    def mark_sharding(self, tensor: torch.Tensor, mesh: Any, partition: Sequence[Any]) -> None:
        """Says over which axis of the mesh each dimension of ``tensor`` is divided; ``None``: over none.

        A tensor that is divided already keeps its division.
        """
        import torch_xla.distributed.spmd as xs

        if "devices=" not in self.sharding(tensor):  # what a program has left whole says {replicated}
            xs.mark_sharding(tensor, mesh, tuple(partition))

    def constrain(self, tensor: torch.Tensor, mesh: Any, partition: Sequence[Any]) -> torch.Tensor:
        """``tensor`` with a division that the compiler must keep at this point, also for its gradient."""
        import torch_xla.distributed.spmd as xs

        return xs.mark_sharding_with_gradients(tensor, mesh, tuple(partition))  # type: ignore[no-any-return]

    def sharding(self, tensor: torch.Tensor) -> str:
        """XLA's description of how ``tensor`` is divided; empty when nothing was said."""
        return str(self._xla._XLAC._get_xla_sharding_spec(tensor))
