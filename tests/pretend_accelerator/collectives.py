"""A library of collectives for the pretend accelerator that behaves like NCCL where that matters.

It takes no tensors of the CPU, a host that waits for it waits without a limit and without a name, and where a worker
does not come its watchdog ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "pccl"
WATCHDOG_EXIT = 99


class _Work:
    """A collective under way; ``wait`` has no limit."""

    def __init__(self, run: Any, limit: float) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None
        self._watch = threading.Timer(limit, self._end_process)
        self._watch.daemon = True
        self._watch.start()
        threading.Thread(target=self._run, args=(run,), daemon=True).start()

    def _run(self, run: Any) -> None:
        try:
            run()
        except BaseException as error:
            self.error = error
            return  # as a kernel that waits for a peer for ever
        self._done.set()
        self._watch.cancel()

    def _end_process(self) -> None:
        if not self._done.is_set():
            sys.stderr.write("pccl watchdog: a collective did not end; the process is aborted\n")
            os._exit(WATCHDOG_EXIT)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the collective is over."""
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.is_set()

    def cancel(self) -> None:
        """What ``abort`` does."""
        self._watch.cancel()
        self._done.set()


class PretendCollectives(dist.ProcessGroup):
    """Tensors of the pretend accelerator as described above; the CPU's by Gloo if the group was made for both."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._limit = timeout.total_seconds()
        self._cpu = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout)
        self._device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timedelta(days=1))
        self._under_way: list[_Work] = []
        self.calls: list[str] = []

    def getBackendName(self) -> str:
        return NAME

    def abort(self) -> None:
        """Ends what is under way."""
        for work in self._under_way:
            work.cancel()

    def _go(self, what: str, tensors: list[torch.Tensor], plain: Any, staged: Any) -> Any:
        """``plain(group)`` for CPU tensors; else ``staged(group, hosts)`` over copies, written back."""
        kinds = {tensor.device.type for tensor in tensors}
        if kinds == {"cpu"} and "cpu:gloo" in dist.distributed_c10d._world.pg_backend_config[self]:
            return plain(self._cpu)
        if kinds != {"pretend"}:
            raise RuntimeError(f"No backend type associated with device types {kinds}: {what}")
        self.calls.append(what)
        hosts = [tensor.cpu() for tensor in tensors]

        def run() -> None:
            staged(self._device, hosts).wait()
            with torch.no_grad():
                for tensor, host in zip(tensors, hosts, strict=True):
                    tensor.copy_(host)

        work = _Work(run, self._limit)
        self._under_way = [w for w in self._under_way if not w.is_completed()] + [work]
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._go("allreduce", tensors, lambda g: g.allreduce(tensors, opts), lambda g, h: g.allreduce(h, opts))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._go("broadcast", tensors, lambda g: g.broadcast(tensors, opts), lambda g, h: g.broadcast(h, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        return self._go(
            "allgather",
            [*outputs[0], *inputs],
            lambda g: g.allgather(outputs, inputs, opts),
            lambda g, h: g.allgather([h[:-1]], h[-1:], opts),
        )

    def alltoall_base(self, out: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        return self._go(
            "alltoall",
            [out, given],
            lambda g: g.alltoall_base(out, given, out_sizes, in_sizes, opts),
            lambda g, h: g.alltoall_base(h[0], h[1], out_sizes, in_sizes, opts),
        )

    def _reduce_scatter_base(self, out: Any, given: Any, opts: Any = None) -> Any:
        def staged(group: Any, hosts: list[torch.Tensor]) -> Any:
            work = group.allreduce([hosts[1]], dist.AllreduceOptions())
            work.wait()
            part = hosts[1].numel() // self.size()
            hosts[0].copy_(hosts[1].reshape(-1)[self.rank() * part : (self.rank() + 1) * part].view_as(hosts[0]))
            return work

        return self._go("reduce_scatter", [out, given], lambda g: staged(g, [out, given]), staged)

    reduce_scatter_single = _reduce_scatter_base  # its name since torch 2.13

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._go("send", tensors, lambda g: g.send(tensors, to, tag), lambda g, h: g.send(h, to, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._go("recv", tensors, lambda g: g.recv(tensors, source, tag), lambda g, h: g.recv(h, source, tag))

    def barrier(self, opts: Any = None) -> Any:
        return self._cpu.barrier(opts or dist.BarrierOptions())


def register() -> None:
    """Makes it the library of the pretend accelerator."""
    dist.Backend.register_backend(NAME, PretendCollectives, devices=["pretend"])
