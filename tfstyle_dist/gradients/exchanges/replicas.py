"""Several replicas in one process: when ``backward()`` has returned in each, their gradients are summed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import AggregationMethod, ReduceOp
from tfstyle_dist.cross_device_ops.collective import no_rows, sparse_sum_over_workers, sum_parts
from tfstyle_dist.gradients.buckets import HALF, ROWS, Bucket, ReductionPlan, has_rows, only_rows, wants_sparse_gradient
from tfstyle_dist.gradients.counterparts import join, own_records
from tfstyle_dist.gradients.exchanges.between_devices import average_over_devices
from tfstyle_dist.gradients.over_workers import sum_graphs
from tfstyle_dist.gradients.reducer import GradientReducer, GradientState
from tfstyle_dist.ops import aggregate_list
from tfstyle_dist.runtime.clocks import COMMUNICATION
from tfstyle_dist.runtime.context import Replica
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.variables.record import Living, Placement, Record
from tfstyle_dist.variables.store import ParameterStore

_Before = tuple[Record, torch.Tensor | None, torch.Tensor | None, int]  # the leaf, its gradient, how often written to
_New = tuple[Record, torch.Tensor, bool]  # the gradient, and whether there was none before the pass
_SHARED = 64 * 1024  # elements; on a CPU replicas share the memory of larger gradients until one of them writes to it


class ReplicaReducer(GradientReducer):
    """Reduces over the local replicas, then over the workers if there are several.

    The end of ``backward()`` is where the replicas wait for each other, in their own threads, never in autograd's.
    After it every replica's ``.grad`` holds the same numbers in a tensor of its own, so that in-place changes such as
    ``clip_grad_norm_`` in each replica do not add up.
    """

    alive: ClassVar[weakref.WeakSet[ReplicaReducer]] = weakref.WeakSet()
    """All that there are, for what is called in threads that no replica runs."""
    _made, _joined_version = False, -1  # whether a replica has made a parameter in its turn; when they were joined last

    def __init__(
        self, worker: Worker, store: ParameterStore, bytes_per_pack: int = 0, method: int = AggregationMethod.DEFAULT
    ) -> None:
        super().__init__(worker, store, bytes_per_pack, method)
        self.alive.add(self)
        self._one_device, self._half = worker.one_device(), torch.tensor(0.5, device="cpu")
        self._watched_version = -1
        self._watched: list[Record] = []
        self._keeps_state = worker.group.size > 1

    # ---- a backward pass ----------------------------------------------------------------------------------------

    def attach(self, record: Record) -> None:
        """Knows a newly adopted parameter from now on. Frozen ones too: they may thaw."""
        tensor = record.tensor
        self._made |= record.maker is not None
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            self.forget_dead(at_once=False)
            self.states[id(record)] = [GradientState(record, r) for r in range(self.worker.num_local_replicas)]

    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        """Not called: new gradients are seen when ``backward()`` has returned."""

    def in_same_pass(self, state: GradientState) -> bool:
        """Whether a gradient of this copy came in the backward pass under way."""
        return state.ready

    def watch_before(self, record: Record) -> None:
        """For SUM the gradient before each pass is remembered by ``before_pass``."""
        for state in self.states.get(id(record), ()):
            state.watches_before = True

    def before_pass(self, number: int) -> list[_Before]:
        """Local replica ``number`` begins a backward pass; ``after_pass`` wants to know what is there now."""
        before: list[_Before] = []
        for record in own_records(self._records(), number) if self._made else self._records():
            # In its own turn a replica's copy of a module's parameter is the parameter.
            leaf = record.reference() if record.kind == "parameter" else record.components[number]
            grad = None if leaf is None else leaf.grad
            before.append((record, leaf, grad, 0 if grad is None else torch_internals.version_of(grad)))
            if record.policy is not None and record.policy.scale is ReduceOp.SUM:  # only the new part is summed
                state = self.state(record, number)
                if grad is None or not state.dirty:
                    state.before = None if grad is None else grad.detach().clone()
        return before

    def after_pass(self, replica: Replica, before: Sequence[_Before]) -> None:
        """A replica's backward pass has returned: what came in it is reduced.

        Args:
            replica: the replica's context.
            before: what ``before_pass`` returned.
        """
        number = replica.local_replica_id
        touched: dict[int, _New] = {}
        for record, leaf, old, version in before:
            grad = None if leaf is None else leaf.grad
            if grad is None or (grad is old and torch_internals.version_of(grad) == version):
                continue
            policy = record.policy
            if policy is None or policy.reduce_at != "backward":
                continue
            if self._accumulating[number]:
                self.state(record, number).dirty = True
                continue
            if self._keeps_state or policy.scale is ReduceOp.SUM:
                self.state(record, number).ready = True
            touched[id(record.counterparts[0] if record.counterparts else record)] = (record, grad, old is None)
        if touched:
            with self.worker.clocks[number].counting(COMMUNICATION):
                self._reduce(replica, touched)

    def _records(self) -> list[Record]:
        if self._watched_version != self.store.version or [r for r in self._watched if r.reference() is None]:
            self.forget_dead()
            self._watched_version = self.store.version
            self._watched = [r for r in self.store.records() if id(r) in self.states and r.leads]
        return self._watched

    def _reduce(self, replica: Replica, touched: dict[int, _New]) -> None:
        self.summed.update(touched)
        graphs = [(record, grad) for record, grad, _ in touched.values() if grad.requires_grad]
        if graphs:  # create_graph=True
            touched = {key: new for key, new in touched.items() if not new[1].requires_grad}
        replica.barrier("gradient reduction", touched, self._exchange, anywhere=True)
        if graphs:
            # With several workers the exchange has left others in ``grad``: it sums all parameters of a plan.
            given = [(self.state(record, replica.local_replica_id), grad) for record, grad in graphs]
            sum_graphs(self, given, replica.all_reduce)

    def _exchange(self, all_touched: list[dict[int, _New]]) -> list[None]:
        if self._made and self._joined_version != self.store.version:
            self._joined_version = -1 if self.store.placement is Placement.CENTRAL else self.store.version
            if join(self, all_touched):
                self._watched_version = self._plan_version = -1
        first, *others = all_touched
        dirty: dict[int, Record] = {}
        if self.accumulated:
            dirty = {id(r): r for r in self._records() if any(s.dirty for s in self.states[id(r)])}
        with torch.no_grad():
            if self.worker.group.size > 1:
                return self._over_workers()
            plain: list[Sequence[_New]] = []
            rest = dirty
            for key, new in first.items():
                column = (new, *[other[key] for other in others if key in other])
                if len(column) == len(all_touched) and key not in dirty and self._is_plain(column):
                    plain.append(column)
                else:
                    rest[key] = new[0]
            for other in others:
                if other.keys() != first.keys():
                    rest.update({key: new[0] for key, new in other.items() if key not in first})
            self._average(plain)
            if rest:
                self.say_unused([r for key, r in rest.items() if any(key not in part for part in all_touched)])
            for record in rest.values():
                self._reduce_locally(record)
        return [None] * len(all_touched)

    # ---- sums and means over the local replicas -----------------------------------------------------------------

    def _is_plain(self, column: Sequence[_New]) -> bool:
        """Whether every replica has a dense gradient that is averaged as the package does it."""
        record, grad, _ = column[0]
        if self.own_sum is not None or record.policy is None or record.policy.scale is not ReduceOp.MEAN:
            return False
        dtype = grad.dtype
        return not [g for _, g, _ in column if g.layout is not torch.strided or g.dtype is not dtype]

    def _average(self, columns: Sequence[Sequence[_New]]) -> None:
        """Puts the means into the gradients of all replicas."""
        if not columns:
            return
        count = len(columns[0])
        first, *others = [[column[k][1] for column in columns] for k in range(count)]
        if not self._one_device:
            average_over_devices([first, *others], self.method, self.bytes_per_pack)
            return
        if count == 2 and not [g for g in first if g.dtype in HALF]:
            torch_internals.foreach_add_(first, others[0])  # of two numbers there is one sum, whatever the method
            # A number, and any division, takes torch much longer than a tensor on the CPU; a half is exact.
            half = 0.5 if [g for g in first if not g.is_cpu] else self._half
            torch_internals.foreach_mul_(first, half)
        else:
            aggregate_list([first, *others], self.method, outs=first, divisor=count)
        for replica, other in enumerate(others, start=1):
            small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for column, total, grad in zip(columns, first, other, strict=True):
                record, _, fresh = column[replica]
                shared = fresh and total.is_cpu and total.numel() >= _SHARED  # see lazy_clone
                if shared and not wants_sparse_gradient(record):
                    record.components[replica].grad = torch_internals.lazy_clone(total)
                else:
                    small[0].append(grad)
                    small[1].append(total)
            if small[0]:
                torch_internals.foreach_copy_(*small)

    def _parts(self, record: Record) -> list[torch.Tensor]:
        states, device = self.states[id(record)], record.components[0].device
        parts = [None if (c := self.contribution(s)) is None else c.detach().to(device) for s in states]
        given = [p for p in parts if p is not None]
        if len(given) in (0, len(parts)) or any(p.is_sparse for p in given):
            return given
        # As between workers: a replica without a gradient adds zeros, and the sum keeps its shape and bits.
        return [torch.zeros_like(given[0]) if p is None else p for p in parts]

    def _reduce_locally(self, record: Record) -> None:
        parts = self._parts(record)
        if not parts:
            return
        first, divisor, out = record.components[0].grad, self.divisor(record), None
        if first is not None and not (first.is_sparse or first.requires_grad or any(p.is_sparse for p in parts)):
            out = first if parts[0].data_ptr() == first.data_ptr() else None
        self._store(record, sum_parts(parts, self.method, self.own_sum, out, divisor))

    def _store(self, record: Record, total: torch.Tensor) -> None:
        """Gives every replica its own copy of the result, beside what it keeps of earlier passes."""
        states = self.states[id(record)]
        olds = [self.old_part(state) for state in states]
        for state, old in zip(states, olds, strict=True):
            if state.record.tensor is None:
                continue
            component = state.record.components[state.replica]
            grad, own = component.grad, total if old is None else total + old.to(total.device)
            if own.is_sparse:
                component.grad = own.to(component.device, component.dtype, copy=state.replica != 0)
            elif grad is None or grad.is_sparse or grad.requires_grad:
                component.grad = own.to(component.device, component.dtype, copy=True)
            elif grad.data_ptr() != own.data_ptr() or grad.dtype != own.dtype:
                grad.copy_(own)
            self.settle(state)

    # ---- several workers of several replicas ------------------------------------------------------------------

    def _over_workers(self) -> list[None]:
        """The first replica sends the local sums, all buckets in order, and stores the results.

        The workers have agreed on the parameters; one that is gone here since then adds nothing and gets nothing.
        """
        plan, group = self._agreed_plan(), self.worker.group
        with torch.no_grad():
            for bucket in plan.buckets:
                buffer = self._packed(bucket)
                group.all_reduce(buffer, f"gradients[{bucket.index}]", self.method)
                used = buffer[bucket.numel :].tolist()
                for position, (record, offset) in enumerate(zip(bucket.records, bucket.offsets, strict=True)):
                    if only_rows(used[position]):
                        self._sparse_over_workers(record, bucket.no_rows(position))
                    elif used[position] != 0 and record.tensor is not None:
                        like, divisor = record.components[0], self.divisor(record)
                        total = buffer[offset : offset + like.numel()].view(like.shape)
                        self._store(record, total if divisor is None else total / divisor)
            for record in plan.sparse:
                self._sparse_over_workers(record, self._rows[record])
            if self.drift is not None:
                self.drift.after_pass(plan)
        return [None] * self.worker.num_local_replicas

    def _agreed_plan(self) -> ReductionPlan:
        if self._plan is None or self._plan_version != self.store.version:
            _living, plan = Living(self.store.records()), self.plan()
            self._rows = {record: no_rows(record.components[0].detach()) for record in plan.sparse}
        return self.plan()

    def _packed(self, bucket: Bucket) -> torch.Tensor:
        buffer = bucket.new_buffer()
        for position, (record, offset) in enumerate(zip(bucket.records, bucket.offsets, strict=True)):
            if record.tensor is None:
                continue
            given = self._parts(record)
            parts = [p.to_dense().to(bucket.dtype) if p.is_sparse else p.to(bucket.dtype) for p in given]
            if parts:
                view = buffer[offset : offset + parts[0].numel()].view(parts[0].shape)
                sum_parts(parts, self.method, self.own_sum, view)
            if any(s.ready or s.dirty for s in self.states[id(record)]):
                buffer[bucket.numel + position] = ROWS if given and all(map(has_rows, given)) else 1.0
        return buffer

    def _sparse_over_workers(self, record: Record, empty: torch.Tensor) -> None:
        gone = record.tensor is None
        parts = [] if gone else [p if p.is_sparse else p.to_sparse(1) for p in self._parts(record)]
        local = sum_parts(parts, self.method, self.own_sum) if parts else empty
        total = sparse_sum_over_workers(self.worker, local, f"rows of {record.local_name!r}")
        divisor = self.divisor(record)
        if torch_internals.entries_of(total) > 0 and not gone:
            self._store(record, total if divisor is None else total / divisor)
