"""The methods of ``tf.Variable`` that touch some rows only."""

from __future__ import annotations

from typing import Any

import torch


class RowMethods:
    """Part of ``Variable`` and of its copies.

    In replica context the replicas' rows combine by ``aggregation``: for SUM the rows of all replicas are applied one
    after the other, for MEAN after division by the number of replicas, for ONLY_FIRST_REPLICA those of the first one;
    with NONE each copy gets its own. A central copy takes every replica's rows whatever the aggregation. In
    cross-replica context every copy gets the rows.

    All take ``sparse_delta``, an ``IndexedSlices`` or a ``torch.sparse_coo_tensor`` that is sparse in its first
    dimension; ``use_locking`` and ``name`` are accepted for TF's signature. Those named ``scatter_nd_...`` take
    ``indices``, whose last dimension names a place, and ``updates`` of shape ``indices.shape[:-1]`` and what is left of
    the variable's. They return the variable, with NONE in replica context the replica's copy.

    Raises:
        TypeError: another ``sparse_delta``.
        InvalidArgumentError: a row that does not exist, or rows of another shape or dtype.
        NotImplementedError: an ON_READ variable of a mirrored strategy; min, max and update with SUM or MEAN there.

    Source: ``tf.Variable``.
    """

    def _tfstyle_scatter(self, op: str, sparse_delta: Any) -> Any:
        raise NotImplementedError

    def scatter_add(  # torch.Tensor has a method of this name, which numbers keep calling
        self, sparse_delta: Any = None, use_locking: Any = False, name: Any = None, **torch_arguments: Any
    ) -> Any:
        """Adds to some rows. ``scatter_add(dim, index, src)`` is torch's own, which makes a new tensor."""
        if isinstance(sparse_delta, int) or torch_arguments:
            given = (sparse_delta, use_locking, name)
            positional = given[: 3 - len(torch_arguments)] if torch_arguments else given
            whole: Any = self
            return torch.scatter_add(whole, *positional, **torch_arguments)
        return self._tfstyle_scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Subtracts from some rows."""
        return self._tfstyle_scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Multiplies some rows."""
        return self._tfstyle_scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Divides some rows; integers are truncated."""
        return self._tfstyle_scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Sets some rows to the smaller of old and new."""
        return self._tfstyle_scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Sets some rows to the larger of old and new."""
        return self._tfstyle_scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Sets some rows; of a row that is named twice the last one stays."""
        return self._tfstyle_scatter("scatter_update", sparse_delta)

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Adds ``updates[i]`` to ``variable[indices[i, 0], indices[i, 1], ...]``; a place named twice gets both."""
        return self._tfstyle_scatter("scatter_nd_add", (indices, updates))

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Subtracts; see ``scatter_nd_add``."""
        return self._tfstyle_scatter("scatter_nd_sub", (indices, updates))

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Sets; of a place that is named twice the last one stays. See ``scatter_nd_add``."""
        return self._tfstyle_scatter("scatter_nd_update", (indices, updates))

    def batch_scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Sets ``variable[b, ..., indices[b, ..., j]] = values[b, ..., j]``; one copy only."""
        return self._tfstyle_scatter("batch_scatter_update", sparse_delta)
