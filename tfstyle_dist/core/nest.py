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
    is_node = type(structure) in pytree.SUPPORTED_NODES
    # namedtuples, and what a user registered, are nodes too but not by exact type.
    is_node = is_node or isinstance(structure, tuple) or not pytree.tree_is_leaf(structure)
    return pytree.tree_map(fn, structure) if is_node else fn(structure)


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
                f"The {what} of the replicas have different structures: {_difference(structures[0], other, replica)}"
            )
        all_leaves.append(other_flat)
    return all_leaves, spec


_LENGTHS = (
    "What is in a list or tuple is grouped one by one, so each replica must give equally many. Give one tensor and the "
    "lengths, torch.cat(parts) and torch.tensor([len(part) for part in parts]): strategy.gather takes tensors of "
    "different sizes. Or put the list into an object that is no container, such as a dataclass: "
    "strategy.experimental_local_results gives that of each replica."
)


def _difference(first: Any, other: Any, replica: int) -> str:
    """Says where the nest of another replica first differs from that of replica 0, and what to give instead."""
    where, one, two = _first_difference(first, other) or ("", first, other)
    unequal = type(one) is type(two) and isinstance(one, list | tuple)
    advice = _LENGTHS if unequal else "Make every replica return the same nesting, types and keys."
    place = f"at {where} " if where else ""
    return f"{place}replica 0 gave {_said(one)}, replica {replica} gave {_said(two)}. {advice}"


def _first_difference(one: Any, two: Any, where: str = "") -> tuple[str, Any, Any] | None:
    if flatten(one)[1] == flatten(two)[1]:
        return None
    if type(one) is type(two) and isinstance(one, list | tuple | dict):
        keys = list(one) if isinstance(one, dict) else range(len(one))
        if one.keys() == two.keys() if isinstance(one, dict) else len(one) == len(two):
            found = (_first_difference(one[key], two[key], f"{where}[{key!r}]") for key in keys)
            return next(filter(None, found), (where, one, two))
    return where, one, two


def _said(nest: Any) -> str:
    name = type(nest).__name__
    if isinstance(nest, dict):
        return f"a {name} with the keys {list(nest)}"
    return f"a {name} of length {len(nest)}" if isinstance(nest, list | tuple) else f"a value of type {name}"
