"""Containers that grow are remembered by what came to them, and nothing that is written to them is missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.variables.content import marks
from tfstyle_dist.variables.content.marks import Mark, TensorMarks


def _entry(kind: int) -> Any:
    return (1.5, torch.zeros(2), [torch.zeros(1)], {"a": [1]}, deque([2]), set(), None)[kind]


def _containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | deque) else ()
    return ([value] if isinstance(value, list | dict | deque | set) else []) + [
        c for v in inner for c in _containers(v)
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | deque) else ()
    return [tensor for v in inner for tensor in _tensors(v)]


def _change(root: Any, where: int, what: int, kind: int) -> None:
    """One write to something in a structure of containers and tensors."""
    containers, tensors = _containers(root), _tensors(root)
    box = containers[where % len(containers)]
    if what == 0 and tensors:
        tensors[where % len(tensors)].add_(1)
    elif isinstance(box, set):
        box.add(len(box))
    elif isinstance(box, dict):
        box[f"{len(box) if what < 3 else 0}"] = _entry(kind)
    elif what == 4 and len(box) > 1:
        box[0] = _entry(kind)
    elif what == 5 and len(box) > 1:
        box.pop()
    else:
        box.append(_entry(kind))


def _seen(mark: Any) -> Any:
    """All that a mark remembers."""
    if type(mark) is not Mark:
        return mark if not isinstance(mark, torch.Tensor) else id(mark)
    return (id(mark.value), mark._state, mark._flat, mark._keys, [_seen(inner) for inner in mark._marks])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.tuples(*[st.integers(0, 50), st.integers(0, 5), st.integers(0, 6)]), max_size=3), max_size=8)
)
def test_a_mark_that_was_renewed_is_like_a_new_one(rounds: list[list[tuple[int, int, int]]]) -> None:
    root: dict[str, Any] = {"history": [torch.zeros(1)], "buffers": {"running_mean": torch.zeros(2)}, "n": [1.0]}
    mark = Mark(root)
    for writes in rounds:
        for write in writes:
            _change(root, *write)
        assert mark.same() == (_seen(mark) == _seen(Mark(root)))
        mark.renew()
        assert mark.same()
        assert _seen(mark) == _seen(Mark(root))
    root["buffers"]["running_mean"].data.add_(1)  # which no version counts
    assert not mark.same()


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(2),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "made in inference mode": torch.inference_mode()(lambda: torch.zeros(2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("written", [0, 1])
def test_marks_of_many_tensors_see_what_one_mark_sees(kind: str, written: int) -> None:
    tensors = [torch.ones(1), KINDS[kind]()]
    many = TensorMarks([Mark(tensor) for tensor in tensors])
    for _ in range(2):
        assert many.same()
        with torch.inference_mode(tensors[written].is_inference()):
            tensors[written].set_(torch.zeros(3)) if tensors[written].is_inference() else tensors[written].mul_(2)
        assert not many.same()
        many.renew()
    assert many.same()


@pytest.mark.parametrize("many", [False, True])
def test_writes_without_a_version_are_seen_in_statistics_that_came_later(many: bool) -> None:
    buffers = {"running_mean": torch.zeros(2)}
    mark = Mark(buffers)
    buffers["running_var"] = torch.ones(2)
    mark.renew()
    seen = TensorMarks(mark.parts()) if many else mark
    for _ in range(2):
        assert seen.same()
        buffers["running_var"].data.add_(1)
        assert not seen.same()
        seen.renew()


def test_a_list_that_grows_in_steps_is_not_marked_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = Mark.__init__
    monkeypatch.setattr(marks.Mark, "__init__", lambda self, *args: made.append(1) or init(self, *args))
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
        model.seen, model.history = [], {"loss": []}

        def step() -> None:
            model.seen.append(model(torch.ones(1)).detach())
            model.history["loss"].append({"value": 1.0})

        for _ in range(50):
            strategy.run(step)
        made.clear()
        for _ in range(10):
            strategy.run(step)
        assert len(made) < 60
        model.seen[3].fill_(7.0)
        model.history["loss"][2]["value"] = 5.0
        seen, histories = strategy.experimental_local_results(strategy.run(lambda: (model.seen, model.history)))
        for entries, history in (seen, histories):
            assert len(entries) == len(history["loss"]) == 60
            assert float(entries[3]) == 7.0
            assert history["loss"][2]["value"] == 5.0
