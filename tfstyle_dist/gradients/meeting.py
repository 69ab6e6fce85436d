"""Several replicas in one process: they meet at the end of backward, and each sums a share of the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.cross_device_ops.collective import no_rows, sparse_sum_over_workers
from tfstyle_dist.gradients.plan import HALF, Bucket
from tfstyle_dist.gradients.reducer import GradientReducer, Slot, queue_end_of_backward
from tfstyle_dist.ops import aggregate, aggregate_list
from tfstyle_dist.runtime.clocks import COMMUNICATION
from tfstyle_dist.runtime.rendezvous import ThreadedRun
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.record import Record, raw
from tfstyle_dist.variables.store import ParameterStore

# Below this one thread sums everything while the others wait: a second meeting would cost more.
_ALONE_BYTES = 256 * 1024


class MeetingReducer(GradientReducer):
    """Reduces over the local replicas, then over the workers if there are several.

    Gradients are per replica, the weights are not: after the pass every replica's ``.grad`` holds the same numbers in a
    tensor of its own, so that in-place changes such as ``clip_grad_norm_`` in each replica do not add up.
    """

    def __init__(
        self, worker: Worker, store: ParameterStore, bytes_per_pack: int = 0, method: int = AggregationMethod.DEFAULT
    ) -> None:
        super().__init__(worker, store, bytes_per_pack, method)
        self._one_device = worker.one_device()
        self._runs: list[ThreadedRun | None] = [None] * worker.num_local_replicas
        # For each replica: the records with a new gradient, for each backward pass under way (by autograd's number).
        self._touched: list[dict[int, dict[int, Record]]] = [{} for _ in range(worker.num_local_replicas)]

    def attach(self, record: Record) -> None:
        """Watches the copies, and the user's own object: a custom autograd Function leaves its gradient there."""
        super().attach(record)
        tensor = record.tensor
        if tensor is None or id(record) not in self.slots:
            return
        with raw():
            frozen = not tensor.requires_grad
            tensor.requires_grad_(True)
            tensor.register_hook(lambda grad: self._move_base_gradient(grad, record))
            tensor.requires_grad_(not frozen)

    def _move_base_gradient(self, grad: torch.Tensor, record: Record) -> None:
        """A gradient that bypassed ``__torch_function__`` belongs to the replica whose backward made it.

        All replicas share the object, so what autograd adds up in its own ``.grad`` is not used; the end of the pass
        drops it.
        """
        base = record.tensor
        if base is None or _only_captured(base):
            return  # torch.autograd.grad: local, and nothing is accumulated
        index = record.index()
        if index is None:
            if self.worker.executor.active_run is not None:
                raise RuntimeError(
                    f"A custom autograd.Function made a gradient of {record.describe()!r} in a thread that "
                    f"belongs to no "
                    "replica. Pass the parameter through a torch operation first, e.g. Function.apply(x, p * 1)."
                )
            index = 0
        component, slot = record.components[index], self.slot(record, index)
        self.remember_before(slot)
        component.grad = grad.clone() if component.grad is None else component.grad + grad
        self.on_gradient(component, slot)

    def on_gradient(self, parameter: torch.Tensor, slot: Slot) -> None:
        """Notes the gradient; the first one of a pass asks to be called at its end."""
        if self.keeps_local(slot):
            return
        run = self.worker.executor.active_run
        if run is None:
            self._outside_run(slot)
            return
        slot.ready = True
        replica, task = slot.replica, torch._C._current_graph_task_id()
        passes = self._touched[replica]
        if self._runs[replica] is not run:
            self._runs[replica] = run
            passes.clear()
        if task not in passes:
            passes[task] = {}
            queue_end_of_backward(lambda: self._finish(replica, run, task))
        passes[task][id(slot.record)] = slot.record

    def in_same_pass(self, slot: Slot) -> bool:
        """Whether a gradient of this copy came in the backward pass under way."""
        touched = self._touched[slot.replica].get(torch._C._current_graph_task_id(), {})
        return self._runs[slot.replica] is self.worker.executor.active_run and id(slot.record) in touched

    def _outside_run(self, slot: Slot) -> None:
        """A backward in cross-replica context counts once, for all local replicas."""
        if self.worker.group.size > 1:
            raise RuntimeError(
                f"backward() of {slot.record.describe()!r} outside strategy.run, with several workers of "
                f"several replicas "
                "each. Call it inside strategy.run."
            )

    # ---- the pass ---------------------------------------------------------------------------------------------

    def _finish(self, replica: int, run: ThreadedRun, task: int) -> None:
        touched = self._touched[replica].pop(task)
        with self.worker.clocks[replica].counting(COMMUNICATION):
            self._meet(replica, run, touched)

    def _meet(self, replica: int, run: ThreadedRun, touched: dict[int, Record]) -> None:
        count = self.worker.num_local_replicas

        def share_out(all_touched: list[dict[int, Record]]) -> Sequence[list[Record] | None]:
            self.forget_dead()
            union = {key: record for part in all_touched for key, record in part.items()}
            for record in self.store.records():
                slots = self.slots.get(id(record))
                if slots is not None and any(s.dirty for s in slots):
                    union.setdefault(id(record), record)
            partial = [r for key, r in union.items() if any(key not in part for part in all_touched)]
            self.say_unused(partial)
            self._drop_base_gradients(union.values())
            records = list(union.values())
            if self.worker.group.size == 1 and sum(r.components[0].nbytes for r in records) <= _ALONE_BYTES:
                with torch.no_grad():
                    self._reduce_share(records)
                return [None] * count
            return _balanced(records, count)

        share = run.meet(replica, "gradient reduction", touched, share_out)
        if self.worker.group.size > 1:
            run.meet(replica, "gradient reduction over the workers", None, lambda _: self._over_workers())
            return
        if share is None:
            return
        with torch.no_grad():
            self._reduce_share(share)
        run.meet(replica, "end of gradient reduction", None, lambda payloads: payloads, COMMUNICATION)

    def _drop_base_gradients(self, records: Iterable[Record]) -> None:
        """See ``_move_base_gradient``; all replicas wait, so nobody adds to them."""
        with raw():
            for record in records:
                if (base := record.tensor) is not None:
                    base.grad = None

    def _parts(self, record: Record) -> list[torch.Tensor]:
        slots = self.slots[id(record)]
        device = record.components[0].device
        parts = [None if (c := self.contribution(s)) is None else c.detach().to(device) for s in slots]
        given = [p for p in parts if p is not None]
        if len(given) in (0, len(parts)) or any(p.is_sparse for p in given):
            return given
        # As between workers: a replica without a gradient adds zeros, and the sum keeps its shape and bits.
        return [torch.zeros_like(given[0]) if p is None else p for p in parts]

    def _reduce_share(self, records: Sequence[Record]) -> None:
        """Sums gradients of all local replicas, those that need nothing special as one list."""
        plain = []
        for record in records:
            if self._is_plain(record):
                plain.append(record)
            else:
                self._reduce_locally(record)
        if not plain:
            return
        count = self.worker.num_local_replicas
        first, *others = [[_grad_of(r, k) for r in plain] for k in range(count)]
        if count == 2 and not any(g.dtype in HALF for g in first):
            torch._foreach_add_(first, others[0])  # of two numbers there is one sum, whatever the method
            torch._foreach_div_(first, count)
        else:
            aggregate_list([first, *others], self.method, outs=first, divisor=count)
        for other in others:
            torch._foreach_copy_(other, first)
        for record in plain:
            for slot in self.slots[id(record)]:
                self.settle(slot)

    def _is_plain(self, record: Record) -> bool:
        """Whether every replica has a dense gradient of no graph, on one device, that is averaged."""
        if self.divisor(record) is None or record.tensor is None or not self._one_device:
            return False
        for component in record.components:
            grad = component.grad
            if grad is None or grad.layout is not torch.strided or grad.requires_grad:
                return False
        return True

    def _reduce_locally(self, record: Record) -> None:
        parts = self._parts(record)
        if not parts:
            return
        first = record.components[0].grad
        divisor = self.divisor(record)
        out = None
        if (
            first is not None
            and not first.is_sparse
            and not first.requires_grad
            and parts[0].data_ptr() == first.data_ptr()
        ):
            out = first if all(not p.is_sparse for p in parts) else None
        self._store(record, aggregate(parts, self.method, out=out, divisor=divisor))

    def _store(self, record: Record, total: torch.Tensor) -> None:
        """Gives every replica its own copy of the result."""
        slots = self.slots[id(record)]
        old = self.old_part(next((s for s in slots if s.ready or s.dirty), slots[0]))
        if old is not None:
            total = total + old.to(total.device)
        for slot, component in zip(slots, record.components, strict=True):
            grad = component.grad
            if total.is_sparse:
                component.grad = total.to(component.device, component.dtype) if slot.replica == 0 else total.clone()
            elif grad is None or grad.is_sparse or grad.requires_grad:
                component.grad = total.to(component.device, component.dtype, copy=True)
            elif grad.data_ptr() != total.data_ptr() or grad.dtype != total.dtype:
                grad.copy_(total)
            self.settle(slot)

    # ---- several workers of several replicas ------------------------------------------------------------------

    def _over_workers(self) -> list[None]:
        """The first replica sends the local sums, all buckets in order, and stores the results."""
        plan, group = self.plan(), self.worker.group
        with torch.no_grad():
            for bucket in plan.buckets:
                buffer = self._packed(bucket)
                group.all_reduce(buffer, f"gradients[{bucket.index}]", self.method)
                used = buffer[bucket.numel :].tolist()
                for place, (record, offset) in enumerate(zip(bucket.records, bucket.offsets, strict=True)):
                    if used[place] == 0:
                        continue
                    shape = record.components[0].shape
                    total = buffer[offset : offset + record.components[0].numel()].view(shape)
                    divisor = self.divisor(record)
                    self._store(record, total if divisor is None else total / divisor)
            for record in plan.sparse:
                self._sparse_over_workers(record)
        return [None] * self.worker.num_local_replicas

    def _packed(self, bucket: Bucket) -> torch.Tensor:
        buffer = bucket.new_buffer()
        for place, (record, offset) in enumerate(zip(bucket.records, bucket.offsets, strict=True)):
            parts = [p.to_dense().to(bucket.dtype) if p.is_sparse else p.to(bucket.dtype) for p in self._parts(record)]
            if parts:
                view = buffer[offset : offset + parts[0].numel()].view(parts[0].shape)
                aggregate(parts, self.method, out=view)
            if any(s.ready or s.dirty for s in self.slots[id(record)]):
                buffer[bucket.numel + place] = 1.0
        return buffer

    def _sparse_over_workers(self, record: Record) -> None:
        first = record.components[0]
        parts = [p if p.is_sparse else p.to_sparse(1) for p in self._parts(record)]
        local = aggregate(parts, self.method) if parts else no_rows(first.detach())
        total = sparse_sum_over_workers(self.worker, local, f"rows of {record.local_name!r}")
        divisor = self.divisor(record)
        if total._nnz() > 0:
            self._store(record, total if divisor is None else total / divisor)


def _grad_of(record: Record, replica: int) -> torch.Tensor:
    grad = record.components[replica].grad
    assert grad is not None
    return grad


def _only_captured(leaf: torch.Tensor) -> bool:
    """Whether the pass under way is ``torch.autograd.grad`` for this leaf: the gradient is returned, not kept."""
    with raw():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer for a leaf that is captured
        return True
    return False


def _balanced(records: Sequence[Record], count: int) -> list[list[Record]]:
    """Shares of about equal size, largest parameters dealt first."""
    shares: list[list[Record]] = [[] for _ in range(count)]
    loads = [0] * count
    for record in sorted(records, key=lambda r: -r.components[0].numel()):
        lightest = loads.index(min(loads))
        shares[lightest].append(record)
        loads[lightest] += record.components[0].numel()
    return shares
