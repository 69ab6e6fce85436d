"""``CrossDeviceOps``: sums the values of one worker's replicas and puts the result where it is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.core import devices
from tfstyle_dist.core.enums import AggregationMethod, ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops.collective import OwnSum, local_sum, on_first_device, true_device
from tfstyle_dist.cross_device_ops.rows import dense_rows, reduce_rows
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.values import DistributedValues, IndexedSlices, Mirrored

Pair = tuple[Any, Any]
_PLACES = DistributedValues | IndexedSlices | torch.Tensor | str | torch.device | devices.ReplicaDevice


class CrossDeviceOps:
    """Base of the ways to combine per-replica values (``tf.distribute.CrossDeviceOps``).

    Give an instance to ``MirroredStrategy(cross_device_ops=...)``. A subclass overrides ``sum_values``: all that the
    strategy sums is then summed so in each process, gradients and variables too, before the processes' sums are added.

    Example:
        >>> from tfstyle_dist.values import PerReplica
        >>> op = ReductionToOneDevice()
        >>> op.reduce(ReduceOp.SUM, PerReplica((torch.tensor(1.0), torch.tensor(2.0))), "cpu:0")
        tensor(3.)
    """

    aggregation_method: int = AggregationMethod.DEFAULT

    def sum_values(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of one tensor per replica, as a new tensor on the first one's device."""
        return local_sum(values, self.aggregation_method)

    @property
    def own_sum(self) -> OwnSum | None:
        """``sum_values``, checked, if a user defined it; ``None`` if the package sums, in whichever way is fastest."""
        return None if type(self).sum_values is CrossDeviceOps.sum_values else self._checked_sum

    def _checked_sum(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        for place, value in enumerate(values):
            if value.shape != values[0].shape or value.dtype is not values[0].dtype:
                raise InvalidArgumentError(
                    f"contribution {place} has shape {tuple(value.shape)} and dtype {value.dtype}, but contribution 0 "
                    f"has {tuple(values[0].shape)} and {values[0].dtype}: give tensors that are alike on all replicas."
                )
        total: Any = self.sum_values(on_first_device(values))
        if not isinstance(total, torch.Tensor) or total.shape != values[0].shape:
            got = f"shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
            raise TypeError(
                f"The sum that {type(self).__name__} makes must be a tensor of the shape of each value, "
                f"{tuple(values[0].shape)}, got {got}; return e.g. torch.stack(list(values)).sum(0)."
            )
        return total

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces one value and puts the result on ``destinations``.

        Args:
            reduce_op: a ``ReduceOp`` (strings are refused here, as in TensorFlow).
            per_replica_value: a ``PerReplica``, also of ``IndexedSlices``; a tensor or number, which is nobody's in
                particular, is copied as it is, whatever the ``reduce_op``.
            destinations: a variable or ``PerReplica`` (the result is ``Mirrored``), or one device string.
            options: accepted for TF's signature.

        Returns:
            ``Mirrored`` if ``destinations`` names several places, else one tensor.

        Raises:
            ValueError: ``reduce_op`` is no ``ReduceOp``, ``destinations`` is no place, or a value is no tensor.
        """
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Pair], options: CommunicationOptions | None = None
    ) -> list[Any]:
        """Reduces several values.

        Args:
            reduce_op: a ``ReduceOp``.
            value_destination_pairs: a list or tuple of ``(value, destinations)``.
            options: accepted for TF's signature.

        Returns:
            One result for each pair, see ``reduce``.

        Raises:
            TypeError: ``value_destination_pairs`` is no list or tuple.
            ValueError: one of its entries is no pair, or ``reduce`` refuses it.
        """
        if not isinstance(reduce_op, ReduceOp):
            raise ValueError(f"reduce_op must be ReduceOp.SUM or ReduceOp.MEAN, got {reduce_op!r}.")
        check_pairs(value_destination_pairs)
        return [self._reduce_one(reduce_op, value, where) for value, where in value_destination_pairs]

    def broadcast(self, tensor: torch.Tensor, destinations: Any) -> Any:
        """A copy of ``tensor`` on each of ``destinations``.

        Args:
            tensor: a tensor, number or ``IndexedSlices`` of this worker; nothing is sent to other workers.
            destinations: as for ``reduce``.

        Returns:
            As ``reduce``.

        Raises:
            ValueError: ``destinations`` is no place, or ``tensor`` is none.
        """
        return place(tensor, destinations)

    def _reduce_one(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        if not isinstance(value, DistributedValues):
            return place(value, destinations)
        if all(isinstance(v, IndexedSlices) for v in value.values):
            return place(reduce_rows(None, op, value.values), destinations)
        whole = [dense_rows(v, "reduce") if isinstance(v, IndexedSlices) else _tensor(v) for v in value.values]
        total = (self.own_sum or self.sum_values)(on_first_device(whole))
        return place(total / len(whole) if op is ReduceOp.MEAN else total, destinations)


def check_pairs(pairs: Any) -> None:
    """Raises TypeError unless ``pairs`` is a list or tuple, ValueError unless all its entries are pairs."""
    message = (
        "value_destination_pairs should be a tuple or list of (value, destinations) tuples: [(value, variable), ...]"
    )
    if not isinstance(pairs, list | tuple):
        raise TypeError(f"{message}, got {type(pairs).__name__}.")
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"{message}, but entry {place} is {pair!r}.")


def place(value: Any, destinations: Any) -> Any:
    """Copies of ``value`` where ``destinations`` wants them: ``Mirrored`` for several, else one.

    Raises:
        ValueError: the value cannot be copied to a device, or ``destinations`` is no place.
    """
    if not isinstance(destinations, _PLACES):
        raise ValueError(
            f"destinations must be a variable, a distributed value or a device string, got {destinations!r}. Write "
            "e.g. the variable that is updated next, or 'cpu:0'."
        )
    if isinstance(destinations, DistributedValues):
        copies = [_copy(value, _device(v)) for v in destinations.values]
        return Mirrored(copies, _local_replica) if len(copies) > 1 else copies[0]
    return _copy(value, _device(destinations))


def _copy(value: Any, device: torch.device) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(_copy(value.values, device), _copy(value.indices, device), value.dense_shape)
    return _tensor(value).detach().to(device, copy=True)


def _tensor(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"What is reduced or copied must be a tensor, a number, an array or IndexedSlices, got "
            f"{type(value).__name__}: {value!r}. Call it for each value of a list or dictionary."
        ) from error


def _local_replica() -> int:
    replica = current_replica()
    return 0 if replica is None else replica.local_replica_id


def _device(destination: Any) -> torch.device:
    if isinstance(destination, str | torch.device | devices.ReplicaDevice):
        return devices.parse(destination).torch_device
    if isinstance(destination, IndexedSlices):
        return true_device(destination.values)
    if isinstance(destination, torch.Tensor):
        return true_device(destination)
    return torch.device("cpu")
