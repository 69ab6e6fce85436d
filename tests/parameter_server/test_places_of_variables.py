"""On which server a variable lives, and into how many shards it is cut."""

from __future__ import annotations

import logging
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core import logging as package_logging
from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_colocated_variables_live_on_the_server_of_the_other_one(cluster: Any) -> None:
    """They are not cut, and do not take the turn of a server; so do the parameters of modules."""
    strategy = cluster(workers=1, ps=2, partitioner=FixedShardsPartitioner(2)).strategy
    with strategy.scope():
        first, single = td.Variable([0, 1, 2, 3]), td.Variable(1.0)
        with strategy.extended.colocate_vars_with(first.variables[1]):
            beside = [td.Variable([4, 5]), td.Variable(2.0)]
            layer = torch.nn.Linear(2, 2)
            with strategy.colocate_vars_with(single):
                inner = td.Variable(3.0)
            again = td.Variable(4.0)
        after, last = td.Variable(5.0), td.Variable(6.0)
    assert [part.server_index for part in first.variables] == [0, 1]
    assert not any(isinstance(v, type(first)) for v in beside)
    assert [v.server_index for v in (single, *beside, inner, again, after, last)] == [0, 1, 1, 0, 1, 1, 0]
    assert [v.value().tolist() for v in (*beside, inner)] == [[4, 5], 2.0, 3.0]
    records = [parameter._tfstyle_record for parameter in layer.parameters()]  # type: ignore[attr-defined]
    assert [[shard.server for shard in record.shards] for record in records] == [[1], [1]]
    with pytest.raises(ValueError, match="created in the scope"), strategy.extended.colocate_vars_with(torch.zeros(1)):
        pass


@pytest.mark.parametrize("given", [None, [], 2, [0, 1, 1], [-1, 1, 1], [2.5, 1, 1], ["a", 1, 1], [2, 2, 1], [2]])
def test_a_partitioner_that_gives_no_numbers_is_explained(cluster: Any, given: Any) -> None:
    c = cluster(workers=1, ps=1, start=False, coordinator=False)
    resolver = td.cluster_resolver.SimpleClusterResolver(td.cluster_resolver.ClusterSpec(c.spec), "", "chief", 0)
    strategy = td.ParameterServerStrategy(resolver, variable_partitioner=lambda shape, dtype: given)
    try:
        with strategy.scope(), pytest.raises(ValueError, match=r"_partitioner gave .* Return e\.g\. \[2, 1, 1\]"):
            td.Variable(torch.zeros(2, 2, 2))
    finally:
        strategy.close()


def test_what_is_no_partitioner_is_refused_at_once(cluster: Any) -> None:
    c = cluster(workers=1, ps=1, start=False, coordinator=False)
    resolver = td.cluster_resolver.SimpleClusterResolver(td.cluster_resolver.ClusterSpec(c.spec), "", "chief", 0)
    with pytest.raises(TypeError, match="must be a function of shape and dtype"):
        td.ParameterServerStrategy(resolver, variable_partitioner=5)  # type: ignore[arg-type]


def test_partitioners_of_other_whole_numbers_and_of_nothing_to_cut(cluster: Any) -> None:
    counts: list[Any] = [np.array([3, 1])[0], 0]

    def partitioner(shape: Any, dtype: Any) -> tuple[Any, ...]:
        return (counts[0] if shape[0] else counts[1], *[1] * (len(shape) - 1))

    strategy = cluster(workers=1, ps=1, partitioner=partitioner).strategy
    with strategy.scope():
        assert len(td.Variable(torch.zeros(7, 2)).variables) == 3  # type: ignore[attr-defined]
        assert td.Variable(torch.empty(0, 2)).value().shape == (0, 2)


def test_run_in_the_chiefs_program_is_said_once(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works, but the workers have nothing to do; in a scheduled function nothing is said."""
    monkeypatch.setattr(package_logging, "_said", set(), raising=False)
    c = cluster(workers=1, ps=1)
    strategy = c.strategy
    monkeypatch.setattr(logging.getLogger("tfstyle_dist"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="tfstyle_dist"):
        assert c.coordinator.schedule(lambda: strategy.run(lambda: 2)).fetch(timeout=30) == 2
        assert "outside of ClusterCoordinator.schedule" not in caplog.text
        assert strategy.run(lambda: 2) == 2
        assert strategy.reduce("SUM", torch.ones(2), axis=None).tolist() == [1.0, 1.0]
    assert caplog.text.count("outside of ClusterCoordinator.schedule") == 1
