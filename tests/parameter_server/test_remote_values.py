"""Results of scheduled functions as arguments of others."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import CancelledError

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def add(a: Any, b: Any) -> Any:
    time.sleep(0.002)
    return a + b


def test_results_as_arguments(cluster: Any) -> None:
    c = cluster(workers=2, ps=1)
    schedule = c.coordinator.schedule
    first = schedule(add, args=(torch.ones(3), 1.0))
    chain = first
    for _ in range(20):
        chain = schedule(add, args=(chain, first))
    assert chain.fetch(timeout=30).tolist() == [42.0] * 3
    nested = schedule(lambda d, *, x: d["a"][0] + x, args=({"a": [first]},), kwargs={"x": chain})
    assert nested.fetch(timeout=30).tolist() == [44.0] * 3
    # From one worker to the other; the second one changes its own copy only.
    here = schedule(lambda: torch.zeros(100_000), worker=0)
    there = schedule(lambda t: float(t.add_(1.0).sum()), args=(here,), worker=1)
    again = schedule(lambda t: float(t.add_(1.0).sum()), args=(here,), worker=0)
    assert c.coordinator.fetch([there, again]) == [100_000, 100_000]
    c.coordinator.join(timeout=30)
    assert c.coordinator.done()


def test_no_result_as_an_argument(cluster: Any) -> None:
    schedule = cluster(workers=2, ps=1).coordinator.schedule
    nothing = schedule(lambda: None, worker=0)
    seen = [schedule(lambda value, say=say: (value, say), args=(nothing,), worker=say) for say in (0, 1, 0)]
    assert [value.get(timeout=30) for value in seen] == [(None, 0), (None, 1), (None, 0)]
    assert nothing.get() is None


def test_many_results_of_one_worker_are_given_up_and_sent_again(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    old = c.coordinator.schedule(add, args=(1, 2))
    last = c.coordinator.schedule(add, args=(old, 0))
    for _ in range(100):
        last = c.coordinator.schedule(add, args=(last, 1))
    assert last.get(timeout=30) == 103
    assert c.coordinator.schedule(add, args=(old, old)).get(timeout=30) == 6


def test_a_lost_worker_takes_its_results_along(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=1)
    marker = tmp_path / "died"

    def last(value: int) -> int:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value + 1

    first = c.coordinator.schedule(add, args=(1, 2), worker=0)
    assert c.coordinator.schedule(last, args=(first,)).get(timeout=30) == 4


def test_results_that_never_come(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=1, ps=1)

    both = tmp_path / "both"

    def fails() -> None:
        while not both.exists():
            time.sleep(0.01)
        raise KeyError("on purpose")

    bad = c.coordinator.schedule(fails)
    waits = c.coordinator.schedule(add, args=(bad, 1))
    both.touch()
    with pytest.raises(KeyError):
        c.coordinator.join(timeout=30)
    with pytest.raises(CancelledError):
        waits.get(timeout=5)
    with pytest.raises(KeyError):
        c.coordinator.schedule(add, args=(bad, 1))
    captured = c.coordinator.schedule(add, args=(1, 1))
    with pytest.raises(ValueError, match="as an argument"):
        c.coordinator.schedule(lambda: captured)
    other = cluster(workers=1, ps=1)
    with pytest.raises(ValueError, match="another coordinator"):
        other.coordinator.schedule(add, args=(captured, 1))
    assert td.coordinator.RemoteValue is type(captured)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:ComplexHalf")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_results_that_numpy_lacks(cluster: Any) -> None:
    """``fetch`` leaves them tensors, as TensorFlow leaves a sparse tensor one; scales and shapes travel along."""
    schedule = cluster(workers=1, ps=1).coordinator.schedule
    made = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "rows": lambda: torch.eye(2).to_sparse_csr(),
        "eight bits": lambda: torch.ones(2).to(torch.float8_e4m3fn),
        "half": lambda: torch.ones(2, dtype=torch.complex32),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 3, torch.quint8),
    }
    results = {name: schedule(make) for name, make in made.items()}
    sent = {name: schedule(lambda value: value, args=(make(),)) for name, make in made.items()}
    for name, make in made.items():
        for result in (results[name].fetch(timeout=30), sent[name].fetch(timeout=30)):
            assert isinstance(result, torch.Tensor), name
            assert (result.dtype, result.layout) == (make().dtype, make().layout), name
            assert str(result) == str(make()), name


def test_results_of_views_that_are_not_computed_yet(cluster: Any) -> None:
    """Conjugates and negatives are flags of a view; what arrives are the values."""
    schedule = cluster(workers=1, ps=1).coordinator.schedule
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert schedule(lambda: value.conj()).fetch(timeout=30).tolist() == [1 - 2j, 3 + 4j]
    assert schedule(lambda v: v, args=(value.conj().imag,)).fetch(timeout=30).tolist() == [-2.0, 4.0]
