"""Parameter groups of optimizers in a checkpoint, and optimizers of another class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tfstyle_dist.checkpoint import files
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.train import Checkpoint

Models = dict[str, torch.nn.Module]
RATES = {"a": 0.1, "b": 0.2}


def models() -> Models:
    return {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}


def groups(of: Models, order: str, rates: dict[str, float] | None = None) -> list[dict[str, Any]]:
    return [{"params": list(of[name].parameters()), **({"lr": rates[name]} if rates else {})} for name in order]


def adam(of: Models) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(groups(of, "ab", RATES))
    sum(model(torch.ones(1, 2)).sum() for model in of.values()).backward()
    optimizer.step()
    return optimizer


def rates(optimizer: torch.optim.Optimizer, of: Models) -> dict[str, float]:
    first = {id(next(model.parameters())): name for name, model in of.items()}
    return {first[id(group["params"][0])]: group["lr"] for group in optimizer.param_groups}


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_groups_in_another_order_keep_their_settings(tmp_path: Path, order: str) -> None:
    of = models()
    path = Checkpoint(**of, optimizer=adam(of)).save(tmp_path / "ckpt")
    again = models()
    optimizer = torch.optim.Adam(groups(again, order))
    Checkpoint(**again, optimizer=optimizer).restore(path).assert_consumed()
    assert rates(optimizer, again) == RATES


@pytest.mark.parametrize("trained", [False, True])
def test_groups_whose_names_come_later(tmp_path: Path, trained: bool) -> None:
    of = models()
    path = Checkpoint(**of, optimizer=adam(of)).save(tmp_path / "ckpt")
    again = models()
    optimizer = torch.optim.Adam(groups(again, "ba"))
    checkpoint = Checkpoint(optimizer=optimizer)
    status = checkpoint.restore(path)
    if trained:
        for group in optimizer.param_groups:
            group["lr"] = 0.05
    checkpoint.a, checkpoint.b = again["a"], again["b"]
    status.assert_consumed()
    assert rates(optimizer, again) == (dict.fromkeys("ab", 0.05) if trained else RATES)


@pytest.mark.parametrize("split", [1, 3])
def test_other_groups_are_refused(tmp_path: Path, split: int) -> None:
    of = models()
    path = Checkpoint(**of, optimizer=adam(of)).save(tmp_path / "ckpt")
    everything = [parameter for model in of.values() for parameter in model.parameters()]
    other = torch.optim.Adam([{"params": everything[:split]}, {"params": everything[split:]}], lr=0.5)
    with pytest.raises(
        InvalidArgumentError, match="in other groups than the saved ones, which are a/weight, a/bias; b/"
    ):
        Checkpoint(**of, optimizer=other).restore(path)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.5]


def test_groups_with_parameters_that_came_and_went(tmp_path: Path) -> None:
    of = models()
    path = Checkpoint(**of, optimizer=adam(of)).save(tmp_path / "ckpt")
    again = {**models(), "c": torch.nn.Linear(1, 1)}
    optimizer = torch.optim.Adam(
        [
            {"params": [again["b"].weight], "lr": 0.5},
            {"params": [*again["a"].parameters(), *again["c"].parameters()], "lr": 0.5},
        ]
    )
    Checkpoint(**again, optimizer=optimizer).restore(path).expect_partial()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_a_model_of_other_names_gets_the_groups_by_place(tmp_path: Path) -> None:
    of = models()
    path = Checkpoint(**of, optimizer=adam(of)).save(tmp_path / "ckpt")
    again = models()
    optimizer = torch.optim.Adam(groups(again, "ab"))
    Checkpoint(x=again["a"], y=again["b"], optimizer=optimizer).restore(path).expect_partial()
    assert rates(optimizer, again) == RATES


def without_class(path: str) -> None:
    """As the versions before wrote it."""
    content = files.read_index(path)
    content["objects"]["optimizer"]["tree"].pop("class", None)
    files.write_index(path, content)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), torch.optim.NAdam, torch.optim.RMSprop]
)
def test_an_optimizer_of_another_class_is_refused(tmp_path: Path, make: Callable[..., Any], earlier: bool) -> None:
    of = models()
    path = Checkpoint(**of, optimizer=adam(of)).save(tmp_path / "ckpt")
    if earlier:
        without_class(path)
    other = make(groups(of, "ab"))
    told = "with .*, saved was one with amsgrad" if earlier else ", saved was one of class Adam"
    with pytest.raises(
        InvalidArgumentError, match=rf"optimizer is an optimizer of class {type(other).__name__}.*{told}"
    ):
        Checkpoint(**of, optimizer=other).restore(path)
    sum(model(torch.ones(1, 2)).sum() for model in of.values()).backward()
    other.step()


class OwnAdam(torch.optim.Adam):
    """A class of the program."""


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, OwnAdam, torch.optim.AdamW])
def test_an_optimizer_of_a_related_class_is_taken(tmp_path: Path, make: Callable[..., Any], earlier: bool) -> None:
    of = models()
    optimizer = adam(of)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    path = Checkpoint(**of, optimizer=optimizer).save(tmp_path / "ckpt")
    if earlier:
        without_class(path)
    other = make(groups(of, "ab"))
    Checkpoint(**of, optimizer=other).restore(path).assert_consumed()
    assert torch.equal(other.state[of["a"].weight]["exp_avg"], optimizer.state[of["a"].weight]["exp_avg"])
    other.step()
