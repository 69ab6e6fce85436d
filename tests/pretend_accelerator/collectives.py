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


class _Work(dist.Work):
    """A collective under way; ``wait`` has no limit."""

    def __init__(self, run: Any, limit: float) -> None:
        super().__init__()
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
            sys.stderr.write(f"pccl: {type(error).__name__}: {error}\n")
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
        self.under_way: list[_Work] = []
        self.calls: list[str] = []

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name  # torch keeps it with the backends of a group, of which this one has none

    def getGroupName(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> PretendCollectives:
        return self  # torch 2.15 asks it whether sends and receives can be put into one call: they cannot

    def abort(self) -> None:
        """Ends what is under way."""
        for work in self.under_way:
            work.cancel()

    def _go(self, what: str, tensors: list[torch.Tensor], plain: Any, staged: Any, written: int | None = None) -> Any:
        """``plain(group)`` for CPU tensors; else ``staged(group, hosts)`` over copies, the first ones written back."""
        kinds = {tensor.device.type for tensor in tensors}
        if kinds == {"meta"}:  # only the sizes exist; torch's own groups do nothing either
            return _Work(lambda: None, self._limit)
        if kinds == {"cpu"} and "cpu:gloo" in dist.distributed_c10d._world.pg_backend_config[self]:
            return plain(self._cpu)
        if kinds != {"pretend"}:
            raise RuntimeError(f"No backend type associated with device types {kinds}: {what}")
        self.calls.append(what)
        hosts = [tensor.cpu() for tensor in tensors]
        begun, failure = None, None
        try:  # here, so that all ranks begin their calls in the order of the program
            begun = staged(self._device, hosts)
        except RuntimeError as error:
            failure = error

        def run() -> None:
            if begun is None:
                raise RuntimeError(what) from failure
            begun.wait()
            with torch.no_grad():
                for tensor, host in [*zip(tensors, hosts, strict=True)][:written]:
                    tensor.copy_(host)

        work = _Work(run, self._limit)
        self.under_way = [w for w in self.under_way if not w.is_completed()] + [work]
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._go("allreduce", tensors, lambda g: g.allreduce(tensors, opts), lambda g, h: g.allreduce(h, opts))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._go("broadcast", tensors, lambda g: g.broadcast(tensors, opts), lambda g, h: g.broadcast(h, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.distributed_c10d.AllgatherOptions()
        return self._go(
            "allgather",
            [*outputs[0], *inputs],
            lambda g: g.allgather(outputs, inputs, opts),
            lambda g, h: g.allgather([h[:-1]], h[-1:], opts),
            written=len(outputs[0]),
        )

    def _allgather_base(self, out: Any, given: Any, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([out], [given], opts)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def staged(group: Any, hosts: list[torch.Tensor]) -> Any:
            for out, given in zip(hosts[: len(inputs)], hosts[len(inputs) :], strict=True):
                parts = list(out.view(self.size(), -1).unbind())
                work = group.allgather([parts], [given.reshape(-1)], dist.distributed_c10d.AllgatherOptions())
                work.wait()
            return work

        tensors = [*outputs, *inputs]
        return self._go("allgather", tensors, lambda g: staged(g, tensors), staged, written=len(outputs))

    def alltoall_base(self, out: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        return self._go(
            "alltoall",
            [out, given],
            lambda g: g.alltoall_base(out, given, out_sizes, in_sizes, opts),
            lambda g, h: g.alltoall_base(h[0], h[1], out_sizes, in_sizes, opts),
            written=1,
        )

    def _reduce_scatter_base(self, out: Any, given: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([out], [given], opts)

    reduce_scatter_single = _reduce_scatter_base  # its name since torch 2.13

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        how = dist.AllreduceOptions()
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG  # which Gloo has not
        how.reduceOp = dist.ReduceOp.SUM if opts is None or mean else opts.reduceOp

        def staged(group: Any, hosts: list[torch.Tensor]) -> Any:
            for out, given in zip(hosts[: len(inputs)], hosts[len(inputs) :], strict=True):
                total = given.clone()
                work = group.allreduce([total], how)
                work.wait()
                part = total.reshape(self.size(), -1)[self.rank()].view_as(out)
                out.copy_(part / self.size() if mean else part)
            return work

        tensors = [*outputs, *inputs]
        return self._go("reduce_scatter", tensors, lambda g: staged(g, tensors), staged, written=len(outputs))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._go(
            "scatter",
            [*outputs, *(inputs[0] if inputs else [])],
            lambda g: g.scatter(outputs, inputs, opts),
            lambda g, h: g.scatter(h[:1], [h[1:]] if inputs else [], opts),
            written=1,
        )

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._go("send", tensors, lambda g: g.send(tensors, to, tag), lambda g, h: g.send(h, to, tag), 0)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._go("recv", tensors, lambda g: g.recv(tensors, source, tag), lambda g, h: g.recv(h, source, tag))

    def barrier(self, opts: Any = None) -> Any:
        return self._cpu.barrier(opts or dist.BarrierOptions())


def register() -> None:
    """Makes it the library of the pretend accelerator."""
    dist.Backend.register_backend(NAME, PretendCollectives, devices=["pretend"])
