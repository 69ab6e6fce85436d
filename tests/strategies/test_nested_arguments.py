"""What a replica gets of nested arguments: its own components, in containers of its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings, strategies as st

import tfstyle_dist as tfd
from tfstyle_dist.core import nest
from tfstyle_dist.values.distributed_values import PerReplica, select_replica


class Pair(NamedTuple):
    first: Any
    second: Any


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, named = st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        named,
        named.map(OrderedDict),
        named.map(lambda entries: defaultdict(list, entries)),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    )


LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=2),
    st.just({3, 4}),
    st.tuples(st.integers(), st.integers()).map(PerReplica),
)
NESTS = st.recursive(LEAVES, _containers, max_leaves=12)


@settings(deadline=None)
@given(NESTS, st.integers(0, 1))
def test_a_replica_gets_what_a_walk_over_all_leaves_gives(structure: Any, replica: int) -> None:
    def of_replica(leaf: Any) -> Any:
        return leaf.values[replica] if isinstance(leaf, PerReplica) else leaf

    found = select_replica(replica, structure)
    assert found == nest.map_structure(of_replica, structure)
    assert type(found) is type(of_replica(structure))


def test_a_list_is_one_of_each_replicas() -> None:
    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    tokens = [[1, 2], [3]]

    def step(given: dict[str, Any]) -> torch.Tensor:
        given["tokens"][1].append(int(given["x"]))
        return torch.tensor(len(given["tokens"][1]))

    lengths = strategy.run(step, args=({"tokens": tokens, "x": PerReplica((torch.ones(()), torch.zeros(())))},))
    assert [int(length) for length in strategy.experimental_local_results(lengths)] == [2, 2]
    assert tokens == [[1, 2], [3]]
    strategy.close()
