"""What a step may write to: that it is seen, and put back."""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.core import logging
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.elastic.membership.membership import MembershipChanged
from tfstyle_dist.elastic.state.held_values import HeldValues
from tfstyle_dist.elastic.state.whole_state import WholeState


class Losses(list[float]):
    """A list whose own methods are the program's alone."""

    def extend(self, values: Iterable[float]) -> None:
        raise AssertionError("The program did not call this.")


class Settings(dict[str, Any]):
    """A dict of a class of its own, with attributes, which the replicas of a worker share."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.seen = [1]


def attributes() -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return {
        "number": 1000.5,
        "texts": ["a", "b"],
        "queue": deque([1, 2, 3], maxlen=3),
        "deep": {"x": [torch.zeros(2), {"y": (torch.ones(2), [7])}]},
        "ordered": OrderedDict(a=1, b=2),
        "names": {"p", "q"},
        "empty": {},
        "counts": Counter(a=1),
        "losses": Losses([1.0]),
        "settings": Settings(rate=0.1),
        "random": random.Random(3),
        "long": list(range(20_001)),
        "graph": torch.ones(2, requires_grad=True) * 2,
        "module": module,
        "buffers": module[1]._buffers,
    }


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another number": lambda a: a.update(number=1001.5),
    "a new name": lambda a: a.update(new=1),
    "a name less": lambda a: a.pop("number"),
    "an entry of a list": lambda a: a["texts"].__setitem__(0, "c"),
    "a longer list": lambda a: a["texts"].append("c"),
    "a rotated queue": lambda a: a["queue"].rotate(1),
    "a list in a tuple in a dict": lambda a: a["deep"]["x"][1]["y"][1].append(8),
    "another tensor": lambda a: a["deep"]["x"].__setitem__(0, torch.zeros(2)),
    "another order": lambda a: a["ordered"].move_to_end("a"),
    "another member of a set": lambda a: (a["names"].remove("p"), a["names"].add("r")),
    "another count": lambda a: a["counts"].update("a"),
    "a longer list of its own class": lambda a: a["losses"].append(2.0),
    "an attribute of a list": lambda a: setattr(a["losses"], "best", 2.0),
    "an entry of a dict of its own class": lambda a: a["settings"].update(rate=0.2),
    "an attribute of a dict of its own class": lambda a: a["settings"].seen.append(2),
    "what was empty": lambda a: a["empty"].update(z=1),
    "another buffer": lambda a: a["buffers"].__setitem__("running_mean", torch.ones(3)),
    "an entry moved to another dict": lambda a: a["empty"].update(number=a.pop("number")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_put_back(change: str) -> None:
    roots = [attributes(), {"other": [1]}]
    held = HeldValues(roots, [])
    assert held.same(roots, [])
    before = [dict(root) for root in roots]
    texts = list(roots[0]["texts"]), list(roots[0]["queue"]), list(roots[0]["ordered"]), set(roots[0]["names"])
    inner = list(roots[0]["deep"]["x"]), list(roots[0]["deep"]["x"][1]["y"][1]), dict(roots[0]["buffers"])
    CHANGES[change](roots[0])
    assert not held.same(roots, [])
    held.put_back()
    assert held.same(roots, [])
    for root, was in zip(roots, before, strict=True):
        assert list(root) == list(was)
        assert all(root[name] is value for name, value in was.items())
    now = roots[0]
    assert (list(now["texts"]), list(now["queue"]), list(now["ordered"]), set(now["names"])) == texts
    assert all(a is b for a, b in zip(now["deep"]["x"], inner[0], strict=True))
    assert now["deep"]["x"][1]["y"][1] == inner[1]
    assert all(now["buffers"][name] is value for name, value in inner[2].items())
    assert not now["empty"]
    assert (now["counts"], now["losses"], vars(now["losses"]), now["settings"]) == ({"a": 1}, [1.0], {}, {"rate": 0.1})
    assert now["settings"].seen == [1]
    assert now["queue"].maxlen == 3


def test_numbers_in_place_leave_all_the_same() -> None:
    roots = [attributes()]
    parameter = nn.Parameter(torch.ones(2))
    held = HeldValues(roots, [parameter])
    roots[0]["deep"]["x"][0].add_(1)
    roots[0]["random"].random()
    assert held.same(roots, [parameter])
    assert not held.same(roots, [nn.Parameter(torch.ones(2))])
    assert not held.same([attributes()], [parameter])


def test_a_tensor_that_comes_to_need_a_gradient_is_looked_at_again() -> None:
    roots = [attributes()]
    held = HeldValues(roots, [])
    assert all(t is not roots[0]["graph"] for t in held.tensors)
    roots[0]["deep"]["x"][0].requires_grad_()
    assert not held.same(roots, [])


def test_what_is_found_can_be_written_to() -> None:
    roots = [attributes()]
    held = HeldValues(roots, [])
    wanted = [roots[0]["deep"]["x"][0], roots[0]["deep"]["x"][1]["y"][0], *roots[0]["buffers"].values()]
    assert [id(t) for t in held.tensors] == [id(t) for t in wanted]
    assert held.randoms == [roots[0]["random"]]


class Counting(nn.Module):
    """Its array is written to in place, or made anew."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.seen = in_place, np.zeros(3)
        self.deep = {"rows": [np.zeros(2, np.uint16)]}
        self.data = np.ones((4, 5), np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.seen[0] += 1
            self.deep["rows"][0][1] = 7
        else:
            self.seen = self.seen + 1
        return x * float(self.data.sum())


@pytest.mark.parametrize("in_place", [True, False])
def test_elements_of_arrays_that_a_step_writes_to_are_put_back_and_said(
    in_place: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        with strategy.scope():
            model = Counting(in_place)
        array, row = model.seen, model.deep["rows"][0]
        fails = [False, False, True]

        def step() -> None:
            model(torch.ones(1))
            if fails.pop():
                raise MembershipChanged("another worker died")

        strategy.run(lambda: None)
        strategy.run(step)
        assert fails == []
    written = [line for line in caplog.text.splitlines() if "elements of a numpy array" in line]
    assert model.seen.tolist() == ([2.0, 0.0, 0.0] if in_place else [1.0] * 3)  # two replicas, once each
    assert array.tolist() == ([2.0, 0.0, 0.0] if in_place else [0.0] * 3)
    assert row.tolist() == ([0, 7] if in_place else [0, 0])
    assert [("'seen' of Counting" in line, "'deep' of Counting" in line) for line in written] == (
        [(True, False), (False, True)] if in_place else []
    )


def test_arrays_come_back_into_the_arrays_that_are_there() -> None:
    """A worker that comes back may have the same array under several names."""
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        with strategy.scope():
            model = Counting(in_place=False)
        strategy.run(lambda: model(torch.ones(1)))
        whole = WholeState(strategy.parameter_store)
        model.seen, model.deep = np.array([1.0, 2.0, 3.0]), {"rows": [np.zeros(2)]}
        there, tensors, _ = whole.describe()
        here = model.seen = np.zeros(3)
        with_other_size = model.data = np.zeros(3)
        whole.install(there, [tensor.clone() for tensor in tensors], complete=True)
        assert model.seen is here
        assert here.tolist() == [1.0, 2.0, 3.0]
        assert model.data.shape == (4, 5)
        assert with_other_size.tolist() == [0.0] * 3


@pytest.fixture
def jobs() -> Iterator[list[Any]]:
    """Two elastic jobs of one worker each."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)))
            for _ in range(2)
        ]


def _variables(strategy: Any, count: int) -> list[Any]:
    with strategy.scope():
        return [tfd.Variable([float(number)]) for number in range(count)]


def _momentum(strategy: Any, variables: list[Any], steps: int) -> Any:
    """An optimizer that has made steps; the job finds it in the closure."""
    optimizer = tfd.train.MomentumOptimizer(1.0, 0.5)
    for _ in range(steps):
        strategy.run(lambda: optimizer.apply_gradients([(torch.ones(1), variable) for variable in variables]))
    return optimizer


def test_a_variable_that_is_gone_on_one_worker_alone_is_left_out(jobs: list[Any]) -> None:
    """The garbage collector comes when it likes; a worker that came back ended with a KeyError."""
    mine, others = (_variables(job, 3) for job in jobs)
    gone = weakref.ref(mine.pop(1))
    gc.collect()
    assert gone() is None
    ours, theirs = _momentum(jobs[0], mine, 1), _momentum(jobs[1], others, 2)
    here, there = (WholeState(job.parameter_store) for job in jobs)
    sent, tensors, _ = there.describe()
    here.install(sent, tensors, complete=True)
    for own, other in zip(mine, (others[0], others[2]), strict=True):
        assert own.read_value().tolist() == other.read_value().tolist()
        assert torch.equal(ours.get_slot(own, "momentum"), theirs.get_slot(other, "momentum"))


@pytest.mark.parametrize("instead", [None, "a parameter"])
def test_a_variable_that_a_worker_has_not_made_is_said(jobs: list[Any], instead: str | None) -> None:
    made, modules = [_variables(job, count) for job, count in zip(jobs, (2, 3), strict=True)], []
    for job in jobs if instead else []:
        with job.scope():
            modules.append(nn.Linear(1, 1))
    here, there = (WholeState(job.parameter_store) for job in jobs)
    sent, tensors, _ = there.describe()
    with pytest.raises(CollectiveMismatchError, match=r"has not made 1 of the 3 Variables .*before tfd.experimental"):
        here.install(sent, tensors, complete=False)
    assert [variable.read_value().tolist() for variable in made[0]] == [[0.0], [1.0]]
    assert len(modules) == (2 if instead else 0)


def test_a_tensor_that_steps_hand_on_in_a_variable_is_said(caplog: pytest.LogCaptureFixture) -> None:
    logging._said.clear()
    hidden = torch.zeros(1)

    def step() -> None:
        nonlocal hidden
        hidden = hidden + 1

    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        strategy.run(step)
    assert hidden.item() == 2, "once for each replica of this worker"
    assert caplog.text.count("reads the variable 'hidden' and then gives it another tensor") == 1


class Normed(torch.nn.Module):
    """As torch's older ``spectral_norm``: before the first pass ``weight`` has the memory of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_orig = torch.nn.Parameter(torch.ones(2, 2))
        self.weight = self.weight_orig.data
        self.register_buffer("now", torch.zeros(2))
        self.before = self.now

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = self.weight_orig / self.weight_orig.norm()
        self.before, self.now = self.now, self.now + 1
        return x @ self.weight


def test_what_shares_memory_with_a_parameter_until_the_first_step_is_taken_apart_from_it() -> None:
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        with strategy.scope():
            model = Normed()
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
        whole = WholeState(strategy.parameter_store)
        there, tensors, _ = whole.describe()
        model.weight, model.before = model.weight_orig.data, model.now  # a worker that came back has made no step
        whole.install(there, [tensor.clone() for tensor in tensors], complete=True)
        assert model.weight_orig.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert model.weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert (model.before.tolist(), model.now.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_what_shares_memory_on_the_others_goes_on_sharing_it() -> None:
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        with strategy.scope():
            model = Normed()
        strategy.run(lambda: model.weight_orig.sum().backward())
        whole = WholeState(strategy.parameter_store)
        there, tensors, _ = whole.describe()
        here = model.weight
        whole.install(there, [tensor.clone() for tensor in tensors], complete=True)
        assert model.weight is here
        here.fill_(3.0)
        assert model.weight_orig.tolist() == [[3.0, 3.0], [3.0, 3.0]]


class Kept:
    """What a loop keeps for itself, in an object that it gives to ``join``."""

    def __init__(self) -> None:
        self.best, self.losses = float("inf"), list[float]()
        self.state: Any = None
        self.replay: deque[Any] = deque(maxlen=3)
        self.sums: defaultdict[str, float] = defaultdict(float)


def test_an_object_that_is_given_to_join_is_sent_whole() -> None:
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        kept, whole = Kept(), WholeState(strategy.parameter_store)
        tfd.experimental.join(strategy, kept)
        strategy.run(lambda: None)
        kept.best, kept.state, kept.losses = 0.5, {"weight": torch.ones(2)}, [1.0, 0.5]
        kept.replay.extend([(torch.full((1,), float(number)), number) for number in range(4)])
        kept.sums["loss"] += 1.5
        there, tensors, _ = whole.describe()
        kept.__dict__.update(Kept().__dict__)
        whole.install(there, [tensor.clone() for tensor in tensors], complete=True)
        assert (kept.best, kept.losses, kept.sums) == (0.5, [1.0, 0.5], {"loss": 1.5})
        assert kept.state["weight"].tolist() == [1.0, 1.0]
        assert [(float(value), number) for value, number in kept.replay] == [(1.0, 1), (2.0, 2), (3.0, 3)]


class Slotted:
    __slots__ = ("calls",)


def test_what_is_in_slots_and_namespaces_is_sent_whole(strategy: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.meter, self.settings = nn.Linear(1, 1), Slotted(), types.SimpleNamespace(rate=1.0)
            self.meter.calls = 0

    strategy.experimental_adopt(trainer := Trainer())
    whole = WholeState(strategy.parameter_store)
    strategy.run(lambda: trainer.model(torch.ones(1, 1)).sum().backward())
    trainer.meter.calls, trainer.settings.rate = 5, 0.5
    there, tensors, _ = whole.describe()
    meter, settings = trainer.meter, trainer.settings
    meter.calls, settings.rate = 0, 1.0
    whole.install(there, [tensor.clone() for tensor in tensors], complete=True)
    assert (trainer.meter, trainer.settings) == (meter, settings)
    assert (meter.calls, settings.rate) == (5, 0.5)
    found = strategy.run(lambda: torch.tensor([meter.calls, settings.rate]))
    assert [each.tolist() for each in strategy.experimental_local_results(found)] == [[5.0, 0.5]] * 4


def test_a_long_container_that_a_repeated_step_has_changed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    logging._said.discard("elastic long container in a step")
    root = {"replay": list(range(20_001)), "other": list(range(20_001))}
    held = HeldValues([root], [])
    held.put_back()
    assert not caplog.records
    root["replay"].append(1)
    held.put_back()
    assert "a list of 20001 entries to one of 20002" in caplog.records[0].message


def test_a_long_container_that_a_worker_is_not_sent_is_said(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)
            self.replay: deque[int] = deque(range(20_001))
            self.short = [1]

    logging._said.discard("elastic long Trainer.replay")
    strategy.experimental_adopt(trainer := Trainer())
    whole = WholeState(strategy.parameter_store)
    sent, tensors, _ = whole.describe()
    whole.install(sent, tensors, complete=True)
    assert "goes on with its own" not in caplog.text  # such as a vocabulary, which every program makes
    trainer.replay.clear()
    whole.install(sent, tensors, complete=True)
    assert "'replay' of Trainer holds [20001] entries on the workers that this one joins, and fewer here" in caplog.text
    assert not trainer.replay
