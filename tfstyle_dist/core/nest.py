"""Nested structures: torch's pytree, with distributed values as leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfstyle_dist.core.torch_internals import pytree

flatten = pytree.tree_flatten
unflatten = pytree.tree_unflatten
leaves = pytree.tree_leaves


def map_structure(fn: Callable[[Any], Any], structure: Any) -> Any:
    """``structure`` with ``fn`` applied to each leaf. A bare leaf, the common case, costs no tree walk."""
    if type(structure) not in pytree.SUPPORTED_NODES:
        # namedtuples, and what a user registered, are nodes too but not by exact type.
        if not isinstance(structure, tuple) and not pytree.tree_is_leaf(structure):
            return pytree.tree_map(fn, structure)
        if not isinstance(structure, tuple):
            return fn(structure)
    return pytree.tree_map(fn, structure)


def assert_same_structure(structures: Sequence[Any], what: str) -> tuple[list[list[Any]], Any]:
    """Flattens all ``structures`` and checks that they are alike.

    Args:
        structures: one nest per replica.
        what: names the nests in the error, e.g. ``"return values"``.

    Returns:
        The leaves of each nest, and the common structure.

    Raises:
        AssertionError: two nests differ; the message names the replica.
    """
    flat, spec = flatten(structures[0])
    all_leaves = [flat]
    for replica, other in enumerate(structures[1:], start=1):
        other_flat, other_spec = flatten(other)
        if other_spec != spec:
            raise AssertionError(
                f"The {what} of the replicas have different structures: replica 0 gave {spec}, replica {replica} "
                f"gave {other_spec}. Make every replica return the same nesting, types and keys."
            )
        all_leaves.append(other_flat)
    return all_leaves, spec
