"""``tf.distribute.ReplicaContext``: what a function inside ``strategy.run`` can ask and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.core import nest, torch_internals
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.tracing import region
from tfstyle_dist.runtime.clocks import COMMUNICATION, WAIT, Phase
from tfstyle_dist.runtime.context import Frame, current_frame, entered
from tfstyle_dist.runtime.replica_run import Action, InlineRun, ReplicaRun
from tfstyle_dist.strategies import replica_reductions
from tfstyle_dist.strategies.arguments import check_arguments
from tfstyle_dist.strategies.leaves import as_reducible, has_rows, of_one_replica, refuse_rows
from tfstyle_dist.strategies.share_runs import note_what_it_gives
from tfstyle_dist.values import IndexedSlices, Share, regroup, select_replica

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


class ReplicaContext:
    """The view of one replica (``tf.distribute.ReplicaContext``); get it with ``get_replica_context()``.

    Args:
        strategy: the strategy that runs.
        replica_id_in_sync_group: this replica's number among all replicas.
        local_replica_id: its number on this worker.
        run: the call of ``strategy.run`` that it is part of.
        share: its part of the batch that the step was given; ``None`` where all replicas weigh the same.

    Example:
        >>> def step(x):
        ...     return get_replica_context().all_reduce("MEAN", x.mean())
        >>> strategy.run(step, args=(batch,))
    """

    def __init__(
        self,
        strategy: Strategy,
        replica_id_in_sync_group: int,
        *,
        local_replica_id: int = 0,
        run: ReplicaRun | None = None,
        share: Share | None = None,
    ) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self.local_replica_id = local_replica_id
        self.share = share
        self._run: ReplicaRun = run if run is not None else InlineRun()

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's number, 0 to ``num_replicas_in_sync - 1``."""
        return self._replica_id

    @property
    def replica_id(self) -> int:
        """The same number; the short name."""
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """The one device of this replica, as a string in a tuple; ``("cpu:0",)`` under the default strategy."""
        devices = self._strategy.worker.devices
        return (str(devices[self.local_replica_id]),) if devices else ("cpu:0",)

    @property
    def device(self) -> torch.device:
        """Where this replica's tensors live."""
        return self._strategy.worker.torch_device(self.local_replica_id)

    def barrier(self, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False) -> Any:
        """Joint work of the local replicas; see ``ReplicaRun``."""
        reducer = self._strategy.gradient_reducer
        if reducer is not None and torch_internals.backward_pass_under_way() != -1:
            reducer.meets_in_backward = True
        return self._run.barrier(self.local_replica_id, kind, payload, action, phase, anywhere)

    def begin_update(self) -> None:
        """An optimizer of this replica begins a step; see ``ReplicaRun``."""
        self._run.begin_update(self.local_replica_id)

    def _communicating(self) -> Phase:
        return self._strategy.worker.clocks[self.local_replica_id].counting(COMMUNICATION)

    # ---- collective calls -------------------------------------------------------------------------------------

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Joins all local replicas and calls ``merge_fn`` once, in cross-replica context.

        Args:
            merge_fn: called as ``merge_fn(strategy, *args, **kwargs)``; values that differ from replica to replica, and
                tensors, arrive as ``PerReplica``. If the replicas give different functions, the first replica's is
                used.
            args: positional arguments of this replica.
            kwargs: keyword arguments of this replica.

        Returns:
            What ``merge_fn`` returned, ``PerReplica`` leaves unpacked for this replica.

        Raises:
            RuntimeError: this context is stale, or the replicas made different calls.
            TypeError: ``merge_fn`` cannot be called.
            ValueError: ``args`` is no list or tuple, or ``kwargs`` no dict.

        Example:
            >>> get_replica_context().merge_call(lambda strategy, x: x + 1, args=(3,))
            4
        """
        self._require_current("merge_call")
        strategy = self._strategy
        args, kwargs = check_arguments(merge_fn, args, kwargs, "merge_call")
        note_what_it_gives(self, (args, kwargs))

        def merge(payloads: list[tuple[Sequence[Any], dict[str, Any]]]) -> list[Any]:
            merged_args = regroup([tuple(a) for a, _ in payloads], "merge_call arguments")
            merged_kwargs = regroup([k for _, k in payloads], "merge_call keyword arguments")
            with entered(Frame(strategy)):
                result = merge_fn(strategy, *merged_args, **merged_kwargs)
            return [result] if len(payloads) == 1 else [select_replica(r, result) for r in range(len(payloads))]

        result = self.barrier("merge_call", (args, kwargs), merge)
        return select_replica(0, result) if strategy.worker.num_local_replicas == 1 else result

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduces ``value`` over all replicas of all workers; every replica gets the result.

        Differentiable: the gradient of a SUM is the sum over the replicas of the incoming gradients, of a MEAN their
        mean; its backward is collective too.

        Args:
            reduce_op: SUM or MEAN, or the name in any case.
            value: a nest of tensors, of equal shapes on all replicas, and of ``IndexedSlices``.
            options: accepted for TF's signature.

        Returns:
            The same nest of new tensors on this replica's device; with one replica ``value`` itself, of variables what
            they hold now. ``IndexedSlices`` have the rows of all replicas one
            after the other, so that a row may be named several times.

        Raises:
            ValueError: an unknown ``reduce_op``, or a leaf that is no tensor (n > 1).
            InvalidArgumentError: shapes differ between replicas.
            RuntimeError: called inside ``merge_call`` or with a stale context.

        Example:
            >>> strategy.run(lambda: float(get_replica_context().all_reduce("SUM", torch.tensor(2.0))))
            PerReplica:{
              0: 4.0,
              1: 4.0
            }
        """
        self._require_current("all_reduce")
        op = ReduceOp.from_any(reduce_op)
        leaves, spec = nest.flatten(value)
        if self.num_replicas_in_sync == 1:
            if any(leaf is None for leaf in leaves):
                raise ValueError("all_reduce of None: None values have no type; pass a tensor.")
            return of_one_replica(value)
        tensors = [as_reducible(leaf, "all_reduce") for leaf in leaves if not isinstance(leaf, IndexedSlices)]
        with self._communicating(), region("all_reduce in replica context"):
            reduced = iter(replica_reductions.all_reduce(self, op, tensors))
            parts = [
                replica_reductions.reduce_rows(self, op, leaf) if isinstance(leaf, IndexedSlices) else next(reduced)
                for leaf in leaves
            ]
            return nest.unflatten(parts, spec)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenates ``value`` of all replicas along ``axis`` in replica order; every replica gets the result.

        Differentiable: the gradient is this replica's slice of the sum of the incoming gradients.

        Args:
            value: a nest of tensors; sizes may differ along ``axis`` only.
            axis: a dimension, not negative.
            options: accepted for TF's signature.

        Returns:
            The same nest of new tensors on this replica's device; with one replica ``value`` itself, of variables what
            they hold now.

        Raises:
            NotImplementedError: a leaf is ``IndexedSlices``.
            ValueError: ``axis`` is no whole number, or a leaf is no tensor (n > 1).
            InvalidArgumentError: a scalar, an axis out of range, or shapes that differ elsewhere.
            RuntimeError: called inside ``merge_call`` or with a stale context.

        Example:
            >>> def step():
            ...     context = get_replica_context()
            ...     return context.all_gather(torch.tensor([context.replica_id]), axis=0).tolist()
            >>> strategy.experimental_local_results(strategy.run(step))
            ([0, 1], [0, 1])
        """
        self._require_current("all_gather")
        leaves, spec = nest.flatten(value)
        for leaf in leaves:
            if has_rows(leaf):
                refuse_rows(leaf, "all_gather")
        if self.num_replicas_in_sync == 1:
            return of_one_replica(value)
        tensors = [as_reducible(leaf, "all_gather") for leaf in leaves]
        with self._communicating(), region("all_gather in replica context"):
            return nest.unflatten([replica_reductions.all_gather(self, t, axis) for t in tensors], spec)

    def generator(self, seed: int) -> torch.Generator:
        """A random generator of this replica's own, on its device.

        Args:
            seed: the same on all replicas; the replica's number is mixed in.

        Returns:
            A new generator, whose numbers are the same each time it is made; no communication.
        """
        return torch.Generator(device=self.device).manual_seed((seed * 1_000_003 + self._replica_id) % (1 << 63))

    def _require_current(self, what: str) -> None:
        frame = current_frame()
        if (None if frame is None else frame.replica) is self or (frame is None and not self._strategy.worker.devices):
            return
        if frame is not None and frame.strategy is self._strategy and frame.replica is None:
            raise RuntimeError(
                f"{what} needs replica context, but this is cross-replica context (inside merge_call or scope()). "
                f"Mismatching ReplicaContext: call strategy.reduce or strategy.gather here."
            )
        raise RuntimeError(
            f"Mismatching ReplicaContext: {what} was called on the context of replica {self._replica_id} of "
            f"{self._strategy!r}, which is not the one in force (its run has ended, or this is another thread). Call "
            "get_replica_context() anew inside strategy.run."
        )

    def __repr__(self) -> str:
        return f"<ReplicaContext replica {self._replica_id} of {self.num_replicas_in_sync} on {self.devices[0]}>"
