"""One replica on several logical devices: dividing tensors and layers over the workers that share it."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.comm.data_axis import DataAxis
from tfstyle_dist.comm.divided_layers import divide_layers
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.comm.replaced_parameters import step_checks
from tfstyle_dist.core import nest
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.core.process_hooks import install_for
from tfstyle_dist.runtime.context import replica_of
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.variables.adoption import adopt_module


def with_model_axis(group: WorkerGroup, parts: int, num_local_replicas: int) -> WorkerGroup:
    """The workers as replicas of ``parts`` workers each.

    Raises:
        TypeError: ``parts`` is no whole number.
        ValueError: it is less than 1, there are several replicas in a process, or it does not divide the number of
            workers.
    """
    check_whole_number("logical_devices_per_replica", parts)
    if parts < 1:
        raise ValueError(
            f"logical_devices_per_replica={parts}: a replica is on one device or more. Write 1, or leave it out, for a "
            "model in one piece, and e.g. 2 for one in two parts."
        )
    if parts == 1:
        return group
    if num_local_replicas > 1:
        raise ValueError(
            f"logical_devices_per_replica={parts} needs one device in each process, but this one has "
            f"{num_local_replicas} replicas. Start the program with torchrun and leave devices out."
        )
    return DataAxis(group, parts)


def check_whole_number(name: str, value: Any) -> None:
    """Raises TypeError for what is no whole number; ``name`` is that of the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__}); write e.g. 2.")


_numbers = itertools.count()


class LogicalDevices(Strategy):
    """Part of the mirrored strategies: replicas on several logical devices, ``logical_devices_per_replica``."""

    def join_model_axis(self) -> None:
        """Called once the strategy is made."""
        group = self.worker.group
        if isinstance(group, DataAxis):
            device = self.worker.torch_device(0)
            # torch keeps results by equal meshes, also those of a group that was closed: each has a name of its own.
            self.parameter_store.model_mesh = mesh.device_mesh(group.model, device.type, f"model{next(_numbers)}")
            install_for(self, [step_checks])

    @property
    def num_logical_devices_per_replica(self) -> int:
        """How many workers, or XLA devices, hold one replica."""
        group = self.worker.group
        return group.model.size if isinstance(group, DataAxis) else 1

    def experimental_data_mesh(self) -> Any:
        """A ``DeviceMesh`` of the workers that hold the same part of different replicas, e.g. for ``fully_shard``.

        Raises:
            ValueError: there is one worker only.
        """
        group = self.worker.group
        data = group.data if isinstance(group, DataAxis) else group
        return mesh.device_mesh(data, self.worker.torch_device(0).type, "data")

    def _run(self, fn: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Divided results come back whole, and plain tensors may meet divided ones."""
        if self.parameter_store.model_mesh is None:
            return super()._run(fn, arguments, keywords)
        try:
            with mesh.plain_is_whole():
                result = super()._run(fn, arguments, keywords)
        except RuntimeError as error:
            if "local_tensor argument only accepts torch.Tensor" in str(error):  # torch's from_local, in a backward
                error.add_note(
                    "[tfstyle_dist] A plain value met one that is divided, as where a loss adds a penalty on divided "
                    "parameters. Put the divided one together before: model_parallel.whole(p.square().sum())."
                )
            raise
        return nest.map_structure(lambda leaf: mesh.whole(leaf.detach()) if mesh.is_divided(leaf) else leaf, result)

    # ---- tensors ----------------------------------------------------------------------------------------------

    def experimental_split_to_logical_devices(self, tensor: torch.Tensor, partition_dimensions: Sequence[int]) -> Any:
        """Divides a tensor over the logical devices of its replica.

        A call for all workers of a replica alike; the first one's values count. Sizes need not divide evenly: the last
        parts are then smaller, or empty.

        Args:
            tensor: any tensor; gradients go back through what a step divides. Outside of a step of a parameter a new
                parameter is made, to be registered in its place.
            partition_dimensions: into how many parts each dimension is cut; 1 leaves a dimension whole.

        Returns:
            A ``torch.distributed.tensor.DTensor``; on XLA devices the tensor itself, laid out over the devices.

        Raises:
            TypeError: ``partition_dimensions`` is no list of whole numbers.
            ValueError: not one number for each dimension, or their product is not the number of logical devices.
            NotImplementedError: two dimensions are cut (XLA devices can).

        Example:
            >>> module.weight = strategy.experimental_split_to_logical_devices(module.weight, [2, 1])

        Source: ``tf.distribute.TPUStrategy.experimental_split_to_logical_devices``.
        """
        self.check_partition(tensor, partition_dimensions)
        axes = [axis for axis, parts in enumerate(partition_dimensions) if parts > 1]
        if len(axes) > 1:
            raise NotImplementedError(
                f"partition_dimensions={list(partition_dimensions)} cuts {len(axes)} dimensions; one can be cut here. "
                f"Write {self.num_logical_devices_per_replica} for one dimension and 1 for the others."
            )
        if axes and tensor.shape[axes[0]] % self.num_logical_devices_per_replica:
            self._check_means()
        return self._divided(tensor, axes[0]) if axes else tensor

    def _check_means(self) -> None:
        if not mesh.averages_uneven_parts(self.parameter_store.model_mesh):
            warn_once(
                "uneven means",
                f"torch {torch.__version__} takes a wrong mean over a dimension that is divided unevenly: each part "
                "counts alike, whatever its size. Write x.sum() / x.numel(), or divide evenly.",
            )

    def experimental_replicate_to_logical_devices(self, tensor: torch.Tensor) -> Any:
        """Keeps a tensor whole on every logical device of its replica; the first one's values count.

        A parameter that takes part in one computation with divided ones must be divided or replicated itself.

        Args:
            tensor: as for ``experimental_split_to_logical_devices``.

        Returns:
            As ``experimental_split_to_logical_devices``.

        Source: ``tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices``.
        """
        return self._divided(tensor, None) if self.num_logical_devices_per_replica > 1 else tensor

    def experimental_assign_to_logical_device(self, tensor: torch.Tensor, logical_device_id: int) -> Any:
        """Takes the values that one logical device has.

        TensorFlow also computes there what follows. Here each process runs the whole step, so the values are given to
        all of them.

        Args:
            tensor: any tensor; gradients go back through it, to what each process has computed it from.
            logical_device_id: number of the device in its replica.

        Returns:
            As ``experimental_replicate_to_logical_devices``.

        Raises:
            TypeError: ``logical_device_id`` is no whole number.
            ValueError: there is no such device.

        Source: ``tf.distribute.TPUStrategy.experimental_assign_to_logical_device``.
        """
        self.check_logical_device(logical_device_id)
        group, parts = self.worker.group, self.parameter_store.model_mesh
        if isinstance(group, DataAxis):
            return mesh.divide_computed(tensor, parts, None, group.model, logical_device_id)
        return tensor

    def check_logical_device(self, logical_device_id: int) -> None:
        """Raises TypeError for what is no whole number, ValueError when a replica has no such device."""
        check_whole_number("logical_device_id", logical_device_id)
        count = self.num_logical_devices_per_replica
        if not 0 <= logical_device_id < count:
            raise ValueError(
                f"logical_device_id={logical_device_id}, but a replica has the devices 0 to {count - 1}; "
                "give one of them."
            )

    def check_partition(self, tensor: torch.Tensor, partition_dimensions: Sequence[int]) -> None:
        """Raises TypeError for what are no whole numbers, ValueError when a tensor cannot be cut so."""
        if not isinstance(partition_dimensions, Sequence):
            raise TypeError(
                f"partition_dimensions must be a list of whole numbers, one for each dimension, got "
                f"{partition_dimensions!r}; write e.g. [2, 1]."
            )
        for parts in partition_dimensions:
            check_whole_number("an entry of partition_dimensions", parts)
        count, product = self.num_logical_devices_per_replica, math.prod(partition_dimensions)
        if len(partition_dimensions) != tensor.dim():
            raise ValueError(
                f"partition_dimensions={list(partition_dimensions)} has {len(partition_dimensions)} entries for a "
                f"tensor of shape {tuple(tensor.shape)}; give one for each dimension."
            )
        if product != count or any(parts < 1 for parts in partition_dimensions):
            raise ValueError(
                f"partition_dimensions={list(partition_dimensions)} makes {product} parts, but a replica has {count} "
                "logical device(s). Make the strategy with logical_devices_per_replica, or cut into as many parts."
            )

    def _divided(self, tensor: torch.Tensor, axis: int | None) -> torch.Tensor:
        group, parts = self.worker.group, self.parameter_store.model_mesh
        if isinstance(group, DataAxis) and not (tensor.is_leaf and replica_of(self) is None):
            return mesh.divide_computed(tensor, parts, axis, group.model, 0)
        return mesh.divide(tensor, parts, axis)

    # ---- layers -----------------------------------------------------------------------------------------------

    def experimental_partition(self, module: torch.nn.Module, plan: Mapping[str, str]) -> torch.nn.Module:
        """Divides layers of a model over the logical devices of a replica; in place.

        ``"column"`` cuts the output features of a ``Linear`` (or an ``Embedding``'s columns), ``"row"`` its input
        features (or an ``Embedding``'s rows). Give a column-wise layer a row-wise successor: between them each worker
        has its part of the features, and after the row-wise one the whole. A tensor between them is a plain one if the
        features divide evenly, else a ``DTensor``. ``"output"`` cuts as ``"column"``, and its
        result is whole. All else stays whole on every worker.

        Build the optimizer afterwards: the parameters of divided layers are new. All workers call it alike; the first
        worker's values count.

        Args:
            module: built inside or outside the scope.
            plan: layer names, with ``*`` for any part of a name, and how to divide them.

        Returns:
            The same module.

        Raises:
            ValueError: a name that fits no layer, a layer that cannot be divided, is named twice or is divided already,
                or weights that layers have in common and that would be divided in different ways.

        Example:
            >>> strategy.experimental_partition(model, {"*.up": "column", "*.down": "row", "embedding": "row"})
        """
        self.require_cross_replica_context("experimental_partition", "it outside strategy.run")
        group = self.worker.group
        if isinstance(group, DataAxis):
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    if not mesh.is_divided(tensor):
                        tensor.copy_(mesh.values_of(tensor, group.world, 0, "initial values"))
            divide_layers(module, self.parameter_store.model_mesh, plan)
            if self.num_replicas_in_sync > 1:
                adopt_module(self.parameter_store, module)
                self.parameter_store.ensure_equal()
        return module
