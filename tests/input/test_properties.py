"""No sample is lost, none is seen twice, and a saved position goes on exactly: for random sizes and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from lockstep import make, parts_of, run_workers
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input import AutoShardPolicy, FileDataset

# layouts: 1-3 workers of 1-5 replicas
WORKERS, REPLICAS = st.integers(1, 3), st.integers(1, 5)
LENGTHS, BATCHES = st.integers(0, 23), st.integers(1, 9)
EXAMPLES = settings(max_examples=60, deadline=None)

pytestmark = pytest.mark.cpu_only("its workers are threads of one process with replicas on the CPU")
Steps = list[list[list[list[Any]]]]
"""By worker, by step, by local replica: the samples."""


class Numbers(IterableDataset[torch.Tensor]):
    """0.0, 1.0, ... sample by sample, without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(float(i)) for i in range(self.size))


def samples(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(size)))


def epochs(workers: int, replicas: int, dataset: Any, count: int = 1, **request: Any) -> list[Steps]:
    """What all workers see in some epochs."""

    def read(worker: Any) -> list[list[list[list[Any]]]]:
        distributed = make(worker, dataset, **request)
        return [[parts_of(worker, batch) for batch in distributed] for _ in range(count)]

    by_worker = run_workers(workers, replicas, read)
    return [[w[epoch] for w in by_worker] for epoch in range(count)]


def in_order(steps: Steps) -> list[list[Any]]:
    """The global batches, put together from the pieces: piece k is replica k // W of worker k mod W."""
    assert len({len(w) for w in steps}) == 1, "all workers make the same number of steps"
    return [
        [x for column in zip(*step, strict=True) for part in column for x in part] for step in zip(*steps, strict=True)
    ]


def flat(steps: Any) -> list[Any]:
    return [x for part in steps for x in flat(part)] if isinstance(steps, list) else [steps]


@EXAMPLES
@given(LENGTHS, BATCHES, WORKERS, REPLICAS, st.booleans(), st.booleans())
def test_map_style_datasets_are_divided(n: int, size: int, w: int, r: int, shuffle: bool, drop: bool) -> None:
    assume(not drop or size >= w * r)
    (steps,) = epochs(w, r, samples(n), batch_size=size, shuffle=shuffle, seed=3, drop_remainder=drop)
    (alone,) = epochs(1, 1, samples(n), batch_size=size, shuffle=shuffle, seed=3, drop_remainder=drop)
    batches = in_order(steps)
    assert batches == in_order(alone), "the same global batches for any number of replicas"
    expected = n - n % size if drop else n
    seen = flat(batches)
    assert len(seen) == expected
    assert len(set(seen)) == expected
    if not shuffle:
        assert seen == [float(i) for i in range(expected)]


@EXAMPLES
@given(st.integers(1, 23), BATCHES, WORKERS, REPLICAS, st.integers(0, 2**40))
def test_order_is_a_function_of_the_seed(n: int, size: int, w: int, r: int, seed: int) -> None:
    first = epochs(w, r, samples(n), 2, batch_size=size, shuffle=True, seed=seed)
    again = epochs(w, r, samples(n), 2, batch_size=size, shuffle=True, seed=seed)
    assert first == again
    if n > 8:
        assert first[0] != first[1], "a new order in each epoch"


@EXAMPLES
@given(LENGTHS, BATCHES, WORKERS, REPLICAS, st.booleans())
def test_streams_are_divided_like_map_style_datasets(n: int, size: int, w: int, r: int, as_list: bool) -> None:
    stream = list(torch.arange(float(n)).split(size)) if as_list and n else Numbers(n)
    request = {} if isinstance(stream, list) else {"batch_size": size}
    (steps,) = epochs(w, r, stream, **request)
    (by_share,) = epochs(w, r, samples(n), batch_size=size)
    assert steps == by_share


@EXAMPLES
@given(LENGTHS, BATCHES, WORKERS, REPLICAS, st.booleans())
def test_off_gives_every_worker_everything(n: int, size: int, w: int, r: int, map_style: bool) -> None:
    dataset = samples(n) if map_style else Numbers(n)
    (steps,) = epochs(w, r, dataset, batch_size=size, policy=AutoShardPolicy.OFF)
    for worker in steps:
        assert flat(worker) == [float(i) for i in range(n)]
    # TensorFlow's constraints (batch_sizes_for_worker): full batches over all replicas, in parts of nearly equal size.
    for step in list(zip(*steps, strict=True))[: n // size * w]:
        parts = [len(part) for worker in step for part in worker]
        assert sum(parts) == size
        assert max(parts) - min(parts) <= 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), BATCHES, WORKERS, REPLICAS)
def test_files_are_divided(tmp_path_factory: Any, lines: list[int], size: int, w: int, r: int) -> None:
    assume(len(lines) >= w)
    folder = tmp_path_factory.mktemp("files")
    paths, count = [], 0
    for number, length in enumerate(lines):
        paths.append(folder / f"{number}.txt")
        paths[-1].write_text("".join(f"{count + i}\n" for i in range(length)))
        count += length
    assume(count > 0 or w == 1)
    (steps,) = epochs(w, r, FileDataset(paths, decode=float), batch_size=size)
    assert Counter(flat(steps)) == Counter(float(i) for i in range(count))
    assert len({len(worker) for worker in steps}) == 1
    first = [sum(lines[:i]) for i in range(len(lines))]
    for number, worker in enumerate(steps):
        mine = [float(first[f] + i) for f in range(number, len(lines), w) for i in range(lines[f])]
        assert flat(worker) == mine


@EXAMPLES
@given(st.data(), st.integers(1, 23), BATCHES, st.sampled_from(["map", "shuffled", "stream", "off", "sampler"]))
def test_a_saved_position_goes_on_with_any_number_of_replicas(data: Any, n: int, size: int, kind: str) -> None:
    before, after = data.draw(st.tuples(WORKERS, REPLICAS)), data.draw(st.tuples(WORKERS, REPLICAS))
    request: dict[str, Any] = {"batch_size": size}
    dataset: Any = Numbers(n) if kind == "stream" else samples(n)
    if kind == "shuffled":
        request |= {"shuffle": True, "seed": None}  # the seed is in the state
    if kind == "off":
        request |= {"policy": AutoShardPolicy.OFF}
    if kind == "sampler":
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * n, n, replacement=False)
        dataset, request = DataLoader(samples(n), batch_size=size, sampler=sampler), {}
    taken = data.draw(st.integers(0, 30))

    def start(worker: Any) -> tuple[Any, Any]:
        distributed = make(worker, dataset, **request)
        for _ in range(2):  # stop in the second epoch
            iterator, seen = iter(distributed), []
            for _ in range(taken):
                optional = iterator.get_next_as_optional()
                if not optional.has_value():
                    break
                seen.append(parts_of(worker, optional.get_value()))
        return seen, iterator.state_dict()

    def go_on(worker: Any) -> tuple[Any, Any]:
        distributed = make(worker, dataset, **request)
        iterator = iter(distributed)
        iterator.load_state_dict(state)
        return [parts_of(worker, b) for b in iterator], [parts_of(worker, b) for b in distributed]

    torch.manual_seed(n)
    started = run_workers(*before, start)
    state = started[0][1]
    assert all(s == state for _, s in started), "the same state on all workers"
    torch.manual_seed(n + 1)  # a new process draws other random numbers
    if state["position"][1] and after != before:
        with pytest.raises(ValueError, match="inside of a global batch that was divided for"):
            run_workers(*after, go_on)
        return
    continued = run_workers(*after, go_on)
    if kind == "off":
        if after == before:
            assert [head + tail for (head, _), (tail, _) in zip(started, continued, strict=True)] == [
                following for _, following in continued
            ]
        for (head, _), (tail, _) in zip(started, continued, strict=False):
            assert flat(head) + flat(tail) == [float(i) for i in range(n)]
        return
    head, tail = in_order([h for h, _ in started]), in_order([t for t, _ in continued])
    assert sorted(flat(head) + flat(tail)) == [float(i) for i in range(n)]
    assert all(len(b) == size for b in (head + tail)[:-1]), "batches are not cut in two"
    following = in_order([f for _, f in continued])
    assert sorted(flat(following)) == [float(i) for i in range(n)]
    if kind in ("map", "stream"):
        assert flat(head) + flat(tail) == flat(following)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), REPLICAS)
def test_workers_that_read_different_streams_are_told(a: int, b: int, r: int) -> None:
    def read(worker: Any) -> int:
        return sum(1 for _ in make(worker, Numbers(a if worker.group.rank == 0 else b), batch_size=2))

    if a == b:
        assert run_workers(2, r, read) == [-(-a // 2)] * 2
        return
    try:
        run_workers(2, r, read)
    except InvalidArgumentError as error:
        assert "different batches" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a difference was not noticed")
