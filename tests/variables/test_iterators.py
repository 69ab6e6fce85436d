"""Iterators that a step names: all replicas of a process have one in common, which is said where each takes from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tfstyle_dist as td
from tfstyle_dist.variables.content.iterators import Position, is_iterator

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_said_yet")]

VALUES = [0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.5, 0.25]


def drawn(count: int) -> Iterator[float]:
    for _ in range(count):
        yield float(torch.rand(()))


KINDS: dict[str, Callable[[], Iterator[Any]]] = {
    "count": itertools.count,
    "list": lambda: iter(VALUES),
    "dict": lambda: iter(dict(enumerate(VALUES))),
    "generator": lambda: drawn(10),
    "generator of one value": lambda: (0.5 for _ in VALUES),
    "cycle": lambda: itertools.cycle([0.5, 0.25, 0.125]),
    "enumerate": lambda: enumerate(VALUES),
    "zip": lambda: zip(VALUES, VALUES, strict=True),
    "map": lambda: map(float, VALUES),
    "chain": lambda: itertools.chain(VALUES, VALUES),
    "islice": lambda: itertools.islice(itertools.count(), 10),
    "loader": lambda: iter(DataLoader(VALUES)),
    "generator of a loader": lambda: (batch for batch in DataLoader(VALUES)),
}


GLOBAL: Iterator[Any] = iter(())
SAID = "that the step names was changed by replica 0 and then by replica 1"


def in_closure(iterator: Iterator[Any]) -> Callable[[], Any]:
    return lambda: next(iterator)


def in_global(iterator: Iterator[Any]) -> Callable[[], Any]:
    global GLOBAL
    GLOBAL = iterator
    return lambda: next(GLOBAL)


def in_list(iterator: Iterator[Any]) -> Callable[[], Any]:
    box = [iterator]
    return lambda: next(box[0])


def in_default(iterator: Iterator[Any]) -> Callable[[], Any]:
    return lambda it=iterator: next(it)


def trained(step: Callable[..., Any], *arguments: Any, between: Callable[[], Any] = lambda: None) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(1, 1)

        def whole(*arguments: Any) -> None:
            step(*arguments)
            model(torch.ones(1, 1)).backward()

        for _ in range(2):
            strategy.run(whole, arguments)
            between()


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_shows_how_far_an_iterator_is(kind: str) -> None:
    iterator = KINDS[kind]()
    assert is_iterator(type(iterator))
    for _ in range(3):
        before = Position.of(iterator)
        assert Position.of(iterator) == before
        next(iterator)
        assert Position.of(iterator) != before


def nested(depth: int) -> Iterator[Any]:
    return zip(*(nested(depth - 1) for _ in range(30)), strict=True) if depth else iter([0, 0])


def of_many_values() -> Iterator[Any]:
    held = [nested(0) for _ in range(300)]
    _0, _1 = iter(held), iter(tuple(held))
    text = "x" * 100_000
    yield held, text, _0, _1


@pytest.mark.parametrize("make", [lambda: iter((0,) * 100_000), lambda: nested(3), of_many_values])
def test_not_more_is_looked_at_than_takes_no_time(make: Callable[[], Iterator[Any]]) -> None:
    iterator = make()
    next(iterator)
    assert len(Position.of(iterator)) < 20_000


class OddModule:
    def __next__(self) -> int:
        return 0


OddModule.__module__ = None  # type: ignore[assignment]


def test_a_class_without_a_module() -> None:
    assert not is_iterator(OddModule)


@pytest.mark.parametrize("where", [in_closure, in_global, in_list, in_default])
@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_that_each_replica_asks_is_said_once(kind: str, where: Any, caplog: Any) -> None:
    trained(where(KINDS[kind]()))
    assert caplog.text.count(SAID) == 1


def test_nothing_is_said_where_replicas_do_not_take_from_one(caplog: pytest.LogCaptureFixture) -> None:
    iterator = iter(VALUES)

    def first_only() -> None:
        context = td.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            next(iterator)

    trained(first_only)
    assert next(iterator) == VALUES[2]
    trained(lambda: iterator, between=lambda: next(iterator))
    trained(lambda: [next(own) for own in [iter(VALUES)]])
    trained(next, iter(VALUES))  # an argument: meant so
    assert "iterator" not in caplog.text
