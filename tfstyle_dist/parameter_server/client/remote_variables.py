"""Variables and module parameters whose values live on parameter servers, as a program sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.client.table_rows import bound_rows, lookup, row_numbers
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.runtime.context import current_frame, mixing_error
from tfstyle_dist.variables.alias import is_new_parameter, no_parameter
from tfstyle_dist.variables.component import checked
from tfstyle_dist.variables.replicated import Replicated, dispatch
from tfstyle_dist.variables.rows import RowMethods
from tfstyle_dist.variables.scatter import rows_of
from tfstyle_dist.variables.torch_functions import EMBEDDINGS
from tfstyle_dist.variables.variable import Variable

_ROW_FUNCTIONS = frozenset(
    {torch.nn.functional.embedding, torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select}
)
_SUMS = {
    torch.Tensor.add_: Op.ADD, torch.Tensor.__iadd__: Op.ADD, torch.Tensor.sub_: Op.SUB, torch.Tensor.__isub__: Op.SUB
}  # fmt: skip
"""What the servers do themselves, so that nothing is lost that another worker adds meanwhile."""
_OPERATIONS = {"assign": Op.ASSIGN, "assign_add": Op.ADD, "assign_sub": Op.SUB}


class _OnServers(RowMethods, Replicated):
    """Mixin: reading pulls."""

    _tfstyle_record: RemoteRecord

    def _tfstyle_value(self) -> torch.Tensor:
        return self._tfstyle_record.read()

    def _tfstyle_leaf(self) -> torch.Tensor:
        """The local copy as it is: asking for gradients must not pull."""
        return self._tfstyle_record.components[0]

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Picking rows by number pulls those rows alone; every other operation comes through ``dispatch``."""
        if func in EMBEDDINGS and kwargs and kwargs.get("max_norm") is not None and _is_made(args[1]):
            bound_rows(args[1]._tfstyle_record, args[0], kwargs["max_norm"], kwargs["norm_type"])
            kwargs = {**kwargs, "max_norm": None}
        picked = row_numbers(func, args, kwargs or {}) if func in _ROW_FUNCTIONS else None
        if picked is not None and _is_made(picked[0]) and not _has_dense_gradient(picked[0], kwargs or {}):
            return lookup(picked[0]._tfstyle_record, *picked[1:])
        if func in _SUMS and len(args) == 2 and not kwargs and isinstance(args[0], _OnServers):
            return args[0]._tfstyle_sum(_SUMS[func], args[1])
        return dispatch(func, args, kwargs)

    def _tfstyle_sum(self, op: Op, value: Any) -> Any:
        """``v += value`` or ``v -= value``; the local copy is not needed for it."""
        record, local = self._tfstyle_record, self._tfstyle_record.components[0]
        value = value._tfstyle_value() if isinstance(value, Replicated) else value
        has_graph = local.requires_grad and torch.is_grad_enabled()  # torch refuses that of a leaf
        if has_graph or not record.created or not torch.can_cast(torch.result_type(local, value), local.dtype):
            return dispatch(torch.Tensor.add_ if op is Op.ADD else torch.Tensor.sub_, (self, value), None)
        store: Any = record.store
        delta = torch.as_tensor(value, dtype=local.dtype, device="cpu").detach().expand(local.shape)
        store.servers.write(record, op, delta)
        return self

    def _tfstyle_scatter(self, op: str, sparse_delta: Any) -> Any:
        """Adds to or subtracts from some rows, atomically on each shard; a row that is named twice gets both."""
        record = self._tfstyle_record
        if op not in ("scatter_add", "scatter_sub"):
            raise NotImplementedError(
                f"{op} of {record.describe()!r}, which lives on parameter servers: they add and subtract rows. Use "
                "scatter_add, scatter_sub or assign."
            )
        values, rows = rows_of(op, sparse_delta, record.components[0], record.describe)
        store: Any = record.store
        store.servers.add_rows(record, rows, values if op == "scatter_add" else -values)
        return self


def _is_made(table: Any) -> bool:
    return isinstance(table, _OnServers) and table._tfstyle_record.created


def _has_dense_gradient(table: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the gradient of picked rows has all rows, as in torch; not if the module asks for rows."""
    learns = torch.is_grad_enabled() and isinstance(table, ServerParameter) and table.requires_grad
    return learns and not table._tfstyle_record.table and not kwargs.get("sparse")


class ServerVariable(_OnServers, Variable):  # type: ignore[misc]
    """A ``Variable`` on a parameter server. ``assign_add`` and ``assign_sub`` are atomic there."""

    @property
    def server_index(self) -> int:
        """The task index of the parameter server that holds it."""
        return self._tfstyle_record.shards[0].server

    @property
    def device(self) -> str:  # type: ignore[override]
        """The task that holds it, as TensorFlow writes it."""
        return f"/job:ps/replica:0/task:{self.server_index}/device:CPU:0"

    def _assign(self, op: str, value: Any) -> Any:
        record = self._tfstyle_record
        strategy, frame = record.store.strategy, current_frame()
        if frame is not None and frame.strategy is not strategy and strategy is not None:
            raise mixing_error(strategy, frame.strategy, f"assigning variable {self.name!r}")
        tensor = checked(value, record.components[0], self.name)
        store: Any = record.store
        store.servers.write(record, _OPERATIONS[op], tensor)
        return self

    def _tfstyle_plain(self) -> bool:
        return True


class ShardedVariable(ServerVariable):
    """A variable cut along its first dimension over several parameter servers.

    Reading it gives the whole; ``assign`` takes the whole.

    Source: ``tf.distribute`` ``ShardedVariable``.
    """

    _tfstyle_parts: tuple[ServerVariable, ...]

    @property
    def variables(self) -> tuple[ServerVariable, ...]:
        """The shards, in order of their rows."""
        return self._tfstyle_parts

    @property
    def is_sharded_variable(self) -> bool:
        """Always true: what tells it from other variables, as in TensorFlow."""
        return True

    @property
    def server_index(self) -> int:
        """Not defined: see ``variables``."""
        raise ValueError(f"Variable {self.name!r} lives on several servers; look at its .variables.")

    @property
    def device(self) -> str:  # type: ignore[override]
        """The tasks that hold its shards."""
        return ", ".join(v.device for v in self.variables)


class ServerParameter(_OnServers, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter of a module built in the scope, as the coordinator sees it: reading it pulls."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``torch.nn.Parameter(parameter)`` has a message of torch's own, about classes, if it is not refused here."""
        if func is torch.Tensor.detach and is_new_parameter(sys._getframe(1)):
            raise no_parameter(repr(args[0]._tfstyle_record.describe()), args[0]._tfstyle_record)
        return super().__torch_function__(func, types, args, kwargs)


class ServerBuffer(_OnServers, torch.Tensor):  # type: ignore[misc]
    """A buffer of such a module."""
