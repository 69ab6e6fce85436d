"""Plain values, containers and optimizers of rarer kinds: each comes back as it was, or is refused with its place."""

from __future__ import annotations

import collections
from collections import deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tfstyle_dist.checkpoint import codec
from tfstyle_dist.train import Checkpoint

Pair = namedtuple("Pair", "model number")


def there_and_back(folder: Path, value: Any, other: Any = None) -> Any:
    path = Checkpoint(value=value).write(folder / "ckpt")
    checkpoint = Checkpoint(value=other)
    checkpoint.restore(path).assert_consumed()
    return checkpoint.value


def test_a_deque_keeps_its_length(tmp_path: Path) -> None:
    found = there_and_back(tmp_path, deque([1, 2], maxlen=2))
    found.append(3)
    assert found == deque([2, 3])
    assert there_and_back(tmp_path, deque([1, 2])).maxlen is None
    tensors = there_and_back(tmp_path, deque([torch.ones(1)], maxlen=0))
    assert (len(tensors), tensors.maxlen) == (0, 0)


def test_a_deque_of_an_older_checkpoint() -> None:
    assert codec.decode({"$deque": [1, 2]}, lambda name: torch.ones(1)) == deque([1, 2])
    codec.check({"$deque_of": [3, [1]]}, ())
    for damaged in ([-1, [1]], ["x", [1]], [3, 1], [3], 3):
        with pytest.raises(ValueError, match="no value that a checkpoint holds"):
            codec.check({"$deque_of": damaged}, ())


def test_arrays_without_dimensions_stay_arrays(tmp_path: Path) -> None:
    found = there_and_back(tmp_path, np.array(3.5))
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype, float(found)) == ((), np.float64, 3.5)
    assert type(there_and_back(tmp_path, np.float32(0.5))) is float


@pytest.mark.parametrize("value", [np.longdouble(1), np.array(["a"]), np.array([1], dtype=object)])
def test_values_of_numpy_that_torch_has_not(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"settings/deep is a value of numpy of type .*Give numbers of a type"):
        Checkpoint(settings={"deep": value}).write(tmp_path / "ckpt")


@pytest.mark.parametrize("make", [lambda model, number: (model, number), Pair])
def test_a_tuple_of_an_object_and_numbers(tmp_path: Path, make: Any) -> None:
    saved, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    found = there_and_back(tmp_path, [make(saved, 3), 4], [make(model, 0), 0])
    assert type(found[0]) is type(make(model, 0))
    assert found[0][0] is model
    assert (found[0][1], found[1]) == (3, 4)
    assert torch.equal(model.weight, saved.weight)


@pytest.mark.parametrize("name", ["counter", "read", "worker", "save_counter"])
def test_names_that_the_class_needs(name: str) -> None:
    checkpoint = Checkpoint()
    with pytest.raises(ValueError, match=f"cannot track an object under the name '{name}'"):
        setattr(checkpoint, name, 5)
    with pytest.raises(ValueError, match=f"cannot track an object under the name '{name}'"):
        Checkpoint(**{name: 5})


def test_a_backslash_in_a_name(tmp_path: Path) -> None:
    path = Checkpoint(n=1).write(f"{tmp_path}/a\\b")
    checkpoint = Checkpoint(n=0)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.n == 1


@pytest.mark.parametrize(
    ("entries", "name"),
    [({1: torch.ones(1), "1": torch.ones(1)}, "x/1"), ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "x/a/b")],
)
def test_two_entries_of_one_name(tmp_path: Path, entries: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"Two entries of the checkpoint are called '{name}'"):
        Checkpoint(x=entries).write(tmp_path / "ckpt")


def test_what_holds_itself(tmp_path: Path) -> None:
    inner = Checkpoint(n=1)
    inner.again = Checkpoint(inner=inner)
    with pytest.raises(ValueError, match="inner/again/inner is a Checkpoint that holds itself"):
        Checkpoint(inner=inner).write(tmp_path / "ckpt")
    entries: list[Any] = [torch.ones(1)]
    entries.append(entries)
    with pytest.raises(ValueError, match="entries/1 is a list that holds itself"):
        Checkpoint(entries=entries).write(tmp_path / "ckpt")


class Common(torch.optim.SGD):
    """Keeps something for all parameters in its state, under a text."""

    def step(self, closure: Any = None) -> Any:
        seen = self.state.setdefault("seen", {"steps": 0, "mean": torch.zeros(1)})  # type: ignore[call-overload]
        seen["steps"] += 1
        seen["mean"] += 1.0
        return super().step(closure)


class Wrapper(torch.optim.SGD):
    """Its state is not that of torch's optimizers."""

    own: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "own": {(0, 0): self.own}}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["inner"])
        self.own = state["own"][0, 0]


def trained(kind: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_with_a_state_for_all_parameters(tmp_path: Path) -> None:
    saved, optimizer = trained(Common)
    path = Checkpoint(model=saved, optimizer=optimizer).write(tmp_path / "ckpt")
    model = torch.nn.Linear(2, 1)
    again = Common(model.parameters(), lr=0.1, momentum=0.9)
    Checkpoint(model=model, optimizer=again).restore(path).assert_consumed()
    assert again.state["seen"] == {"steps": 1, "mean": torch.ones(1)}  # type: ignore[index]
    assert "momentum_buffer" in again.state[model.weight]


def test_an_optimizer_whose_state_has_another_form(tmp_path: Path) -> None:
    saved, optimizer = trained(Wrapper)
    optimizer.own = torch.full((2,), 7.0)
    path = Checkpoint(model=saved, optimizer=optimizer).write(tmp_path / "ckpt")
    model = torch.nn.Linear(2, 1)
    again = Wrapper(model.parameters(), lr=0.5, momentum=0.9)
    Checkpoint(model=model, optimizer=again).restore(path).assert_consumed()
    assert again.own.tolist() == [7.0, 7.0]
    assert again.param_groups[0]["lr"] == 0.1
    assert "momentum_buffer" in again.state[model.weight]


def test_a_defaultdict_stays_one(tmp_path: Path) -> None:
    def empty() -> dict[str, Any]:
        nested: Any = collections.defaultdict(lambda: collections.defaultdict(list))
        return {"counts": collections.defaultdict(int), "nested": nested, "listed": [collections.defaultdict(int)]}

    values = empty()
    values["counts"]["a"] += 1
    values["nested"]["x"]["y"].append(1)
    values["listed"][0]["b"] += 2
    path = Checkpoint(values=values, counts=values["counts"]).save(tmp_path / "ckpt")
    checkpoint = Checkpoint(values=empty(), counts=collections.defaultdict(int, c=7))
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.values, checkpoint.counts) == (values, {"a": 1})
    checkpoint.values["counts"]["new"] += 1
    checkpoint.values["nested"]["x"]["new"].append(1)
    checkpoint.values["nested"]["new"]["new"].append(1)
    checkpoint.values["listed"][0]["new"] += 1
    checkpoint.counts["new"] += 1
    plain = Checkpoint(counts=None)
    plain.restore(path).expect_partial()
    assert type(plain.counts) is dict
