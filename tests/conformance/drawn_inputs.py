"""Draws programs that read a distributed dataset, and runs them on a facade, TensorFlow's or ours.

Left out is what differs on purpose or by accident of TensorFlow (docs/status.md): batches of ``dataset_fn`` that are
left over for some replicas; and, where a worker cuts its own stream, ``repeat`` after ``batch`` and batches of fewer
examples than workers.
"""

from __future__ import annotations

import random
from typing import Any

from lib.util import describe_error, values_of

KINDS = [("mirrored", 2), ("mirrored", 3), ("mirrored", 4), ("central_storage", 2), ("one_device", 1)]
FORMS = ["one", "pair", "dict", "nested"]
READS = ["for", "for", "for", "left early", "next", "get_next", "optional", "two iterators"]


def drawn(seed: int, workers: int = 1) -> dict[str, Any]:
    """The program of a seed: a chain of tf.data's operations, and how it is read."""
    chance = random.Random(seed)
    kind, n = chance.choice(KINDS) if workers == 1 else ("multi_worker", workers)
    way, size = chance.choice(["dataset", "dataset", "dataset", "function"]), chance.randint(1, 9)
    policy = chance.choice([None, None, "AUTO", "DATA", "OFF", "FILE"])
    if policy == "FILE" and workers > 1:  # it needs files
        policy = "DATA"
    own = policy in ("OFF", "FILE")
    size = max(size, workers) if own else size
    rows, drop = chance.choice([0, 1, 2, 3, 5, 7, 8, 9, 13]), chance.random() < 0.3
    if way == "function":
        rows, drop = size * n * chance.randint(1, 2), False
    before = [_operation(chance) for _ in range(chance.choice([0, 0, 1, 2]))] if way == "dataset" else []
    after = [_operation(chance, own) for _ in range(chance.choice([0, 0, 1]))] if way == "dataset" else []
    return {
        "kind": kind,
        "n": n,
        "way": way,
        "form": chance.choice(FORMS),
        "rows": rows,
        "operations": [*before, ["batch", size, drop], *after],
        "policy": policy,
        "op": chance.choice(["SUM", "MEAN"]),
        "reads": [chance.choice(READS) for _ in range(chance.randint(1, 2))],
    }


def _operation(chance: random.Random, own: bool = False) -> list[Any]:
    kinds = [["take", chance.randint(0, 6)], ["repeat", chance.randint(1, 3)], ["shard", 2, chance.randint(0, 1)]]
    return chance.choice(kinds[:1] if own else kinds)


class Reading:
    """A program under way.

    Args:
        xp: the facade.
        program: see ``drawn``.
        strategy: what runs it, if it is there already.
    """

    def __init__(self, xp: Any, program: dict[str, Any], strategy: Any = None) -> None:
        self.xp, self.program = xp, program
        self.strategy = xp.strategy(program["kind"], program["n"]) if strategy is None else strategy
        self.ended = (StopIteration, self._out_of_range())

    def results(self) -> list[Any]:
        """What each way of reading gave; up to the first error."""
        found: list[Any] = []
        try:
            self.batches = self._distributed()
            for way in self.program["reads"]:
                found.append(getattr(self, "_" + way.replace(" ", "_"))())
        except Exception as error:
            found.append(describe_error(error))
        return found

    def _out_of_range(self) -> type[Exception]:
        if getattr(self.xp, "backend", "") == "tensorflow":
            import tensorflow

            return tensorflow.errors.OutOfRangeError  # type: ignore[no-any-return]
        from tfstyle_dist import errors

        return errors.OutOfRangeError

    def _distributed(self) -> Any:
        numbers = [float(i) for i in range(self.program["rows"])]
        pairs = [[i, -i] for i in numbers]
        data: Any = {"one": numbers, "pair": (numbers, pairs), "dict": {"a": numbers, "b": pairs}}.get(
            self.program["form"], (numbers, numbers)
        )
        if not numbers:
            data = numbers
        dataset = self.xp.dataset_from_list(data)
        if self.program["form"] == "nested" and numbers:
            dataset = dataset.map(lambda *given: {"x": given[0] if len(given) == 1 else given})
        for what, *rest in self.program["operations"]:
            dataset = getattr(dataset, what)(*rest)
        if self.program["policy"] is not None:
            dataset = dataset.with_auto_shard(getattr(self.xp.AutoShardPolicy, self.program["policy"]))
        if self.program["way"] == "function":
            return self.strategy.distribute_datasets_from_function(self.xp.wrap_fn(lambda _: dataset))
        return self.strategy.experimental_distribute_dataset(self.xp.raw(dataset))

    def _one(self, batch: Any) -> Any:
        """A batch as the replicas have it, and what a step makes of it."""

        def step(given: Any) -> Any:
            first = _leaves(given)[0]
            return self.xp.sum(first), first * 2.0

        total, doubled = self.strategy.run(step, args=(batch,))
        reduced = [self.strategy.reduce("SUM", total, axis=None), self.strategy.reduce(self.program["op"], doubled, 0)]
        leaves = [values_of(self.xp, self.strategy, leaf) for leaf in _leaves(batch)]
        return [leaves, *map(self.xp.to_list, reduced)]

    def _for(self, most: int = 99) -> list[Any]:
        found = []
        for batch in self.batches:
            found.append(self._one(batch))
            if len(found) == most:
                break
        return found

    def _left_early(self) -> list[Any]:
        return self._for(1)

    def _taken(self, take: Any, times: int) -> list[Any]:
        found: list[Any] = []
        for number in range(times):
            try:
                found.append(self._one(take(number)))
            except self.ended as error:
                found.append("OutOfRange" if isinstance(error, self.ended[1]) else "StopIteration")
        return found

    def _next(self) -> list[Any]:
        iterator = iter(self.batches)
        return self._taken(lambda _: self.xp.next_of(iterator), 3)

    def _get_next(self) -> list[Any]:
        iterator = iter(self.batches)
        return self._taken(lambda _: iterator.get_next(), 3)

    def _two_iterators(self) -> list[Any]:
        iterators = [iter(self.batches), iter(self.batches)]
        return self._taken(lambda number: self.xp.next_of(iterators[number % 2]), 4)

    def _optional(self) -> list[Any]:
        iterator, found = iter(self.batches), []
        while True:
            optional = iterator.get_next_as_optional()
            if not bool(optional.has_value()):
                return found
            found.append(self._one(optional.get_value()))


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [leaf for key in sorted(batch) for leaf in _leaves(batch[key])]
    return [leaf for part in batch for leaf in _leaves(part)] if isinstance(batch, tuple | list) else [batch]
