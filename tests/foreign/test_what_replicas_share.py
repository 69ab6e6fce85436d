"""What is content, what is shared, and what is refused: the edges of taking turns."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.core import logging
from tfstyle_dist.core.errors import CollectiveMismatchError

FORMS = pytest.mark.parametrize(
    "process_model", ["in_process", pytest.param("ranks", marks=pytest.mark.distributed(workers=2))]
)


def values(strategy: Any, function: Any) -> list[Any]:
    return [v.tolist() for v in strategy.experimental_local_results(strategy.run(lambda: function().detach().clone()))]


def linear(strategy: Any, lr: float = 1.0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


@FORMS
def test_an_optimizer_that_steps_inside_backward_is_refused(strategy: Any, process_model: str) -> None:
    model, optimizer = linear(strategy)
    model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called while backward\(\) is under way"):
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())


@FORMS
def test_gradients_of_one_replica_are_not_applied(strategy: Any, process_model: str) -> None:
    model, optimizer = linear(strategy)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(model(torch.full((1, 2), 1.0 + replica())).sum(), [model.weight])[0]

    def local() -> None:
        model.weight.grad = gradient()
        optimizer.step()

    def reduced() -> None:
        context = tfd.get_replica_context()
        assert context is not None
        model.weight.grad = context.all_reduce("MEAN", gradient())
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"result of torch.autograd.grad \(parameter 'weight'\)"):
        strategy.run(local)
    strategy.run(reduced)
    assert values(strategy, lambda: model.weight)[0] == [[-1.5, -1.5]]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_after_an_error_no_replica_has_drifted(strategy: Any, when: str, failing: int) -> None:
    class Counting(nn.Linear):
        number = 0

    with strategy.scope():
        model = Counting(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    def step(fails: bool) -> None:
        optimizer.zero_grad()
        if when == "after backward":
            model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model.weight.add_(1.0)
        model.number += 1
        if fails and replica() == failing:
            raise ValueError("no")
        if when == "before backward":
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(step, args=(False,))
    with pytest.raises(ValueError, match="no"):
        strategy.run(step, args=(True,))
    for _ in range(2):
        first, second = values(strategy, lambda: torch.cat([model.weight.flatten(), torch.tensor([model.number])]))
        assert first == second
        strategy.run(step, args=(False,))


def test_a_tensor_that_no_object_holds_is_shared_and_said(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging._said.clear()
    total, through = torch.zeros(1), torch.zeros(2)
    kept = strategy.experimental_adopt(torch.zeros(1))

    def step() -> None:
        total.add_(1)
        through.data.copy_(through.data + 1)
        kept.add_(1 + replica())

    for _ in range(3):
        strategy.run(step)
    assert total.item() == 6
    assert caplog.text.count("wrote to a tensor of shape (1,) that it names") == 1
    assert caplog.text.count("wrote to a tensor of shape (2,) that it names") == 1
    assert values(strategy, lambda: kept) == [[3.0], [6.0]]


def test_a_tensor_that_steps_hand_on_in_a_variable_is_said(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging._said.clear()
    hidden, last, count = (torch.zeros(1), torch.zeros(1)), torch.zeros(1), 0

    def step(own: torch.Tensor) -> torch.Tensor:
        nonlocal hidden, last, count
        count += 1
        hidden = (hidden[0] + 1, hidden[1])
        last = own + 1  # not read before: nothing goes on from it
        return last

    own = torch.zeros(1)
    for _ in range(3):
        own = strategy.run(step, args=(own,))
    assert hidden[0].item() == 6
    assert strategy.experimental_local_results(own) == (3, 3)
    assert caplog.text.count("reads the variable 'hidden' and then gives it another tensor") == 1
    assert "'last'" not in caplog.text
    assert caplog.text.count("reads the variable 'count' and then gives it another number") == 1


DECORATORS: dict[str, Any] = {
    "without gradients": torch.no_grad(),
    "autocast": torch.autocast("cpu", enabled=False),
    "compiled": torch.compile(backend="eager"),
    "partial": lambda function: functools.partial(torch.no_grad()(function)),
}


@pytest.mark.parametrize("decorator", DECORATORS)
def test_a_decorated_step_that_hands_on_a_tensor_is_said(
    strategy: Any, decorator: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging._said.clear()
    hidden = torch.zeros(1)

    def step() -> None:
        nonlocal hidden
        hidden = hidden + 1

    strategy.run(DECORATORS[decorator](step))
    assert hidden.item() == 2
    assert caplog.text.count("step reads the variable 'hidden' and then gives it another tensor") == 1


def test_a_tensor_that_functions_of_a_step_hand_on_is_said(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging._said.clear()
    hidden, cached, last = torch.zeros(1), torch.zeros(1), torch.zeros(1)

    def advance() -> None:
        nonlocal hidden
        hidden = hidden + 1

    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def inner() -> None:
            function()

        return inner

    @logged
    def step() -> None:
        nonlocal cached

        def closure() -> None:
            nonlocal last
            last = last + 1

        cached = cached * 2
        advance()
        closure()

    for _ in range(2):
        strategy.run(step)
    for name in ("hidden", "cached", "last"):
        assert caplog.text.count(f"reads the variable {name!r} and then gives it another tensor") == 1


_handed_on = torch.zeros(1)


def test_a_tensor_that_steps_hand_on_in_a_global_is_said(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    logging._said.clear()

    class Trainer:
        def step(self) -> None:
            global _handed_on
            _handed_on = _handed_on + 1

    strategy.run(Trainer().step)
    assert "Trainer.step reads the variable '_handed_on' and then gives it another tensor" in caplog.text


def test_any_object_may_be_adopted(strategy: Any) -> None:
    class Counter:
        def __init__(self) -> None:
            self.number, self.seen = 0, [0]

    data, own = Counter(), strategy.experimental_adopt(Counter())
    data.rows, own.rows = (np.zeros(2000) for _ in range(2))  # what has long arrays is shared, unless it is adopted

    def step() -> None:
        for counter in (data, own):
            counter.number += 1
            counter.seen.append(replica())

    strategy.run(step)
    assert (data.number, data.seen) == (2, [0, 0, 1])
    assert (own.number, own.seen) == (1, [0, 0])
    own.number = 10
    assert values(strategy, lambda: torch.tensor(own.number)) == [10, 10]
    with pytest.raises(TypeError, match="got list"):
        strategy.experimental_adopt([1])


def test_an_optimizer_in_slots_is_found_when_it_steps(strategy: Any) -> None:
    class Holder:
        __slots__ = ("optimizer",)

    holder, (model, _) = Holder(), linear(strategy)
    holder.optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        holder.optimizer.step()

    for _ in range(3):
        strategy.run(step)
    assert holder.optimizer.state[model.weight]["step"].item() == 3


def test_writes_outside_of_run_reach_every_replica(strategy: Any) -> None:
    model, optimizer = linear(strategy)
    strategy.run(lambda: None)
    writes: list[Any] = [
        lambda: model.weight.data.fill_(2.0),
        lambda: nn.init.constant_(model.weight, 3.0),
        lambda: model.load_state_dict({"weight": torch.full((1, 2), 4.0)}),
        lambda: setattr(model.weight, "data", torch.full((1, 2), 5.0)),
        lambda: setattr(model, "weight", nn.Parameter(torch.full((1, 2), 6.0))),
        lambda: model.double(),
    ]
    for write, expected in zip(writes, (2.0, 3.0, 4.0, 5.0, 6.0, 6.0), strict=True):
        with torch.no_grad():
            write()
        assert values(strategy, lambda: model.weight) == [[[expected] * 2]] * 2
    optimizer.param_groups[0]["lr"] = 7.0
    assert values(strategy, lambda: torch.tensor(optimizer.param_groups[0]["lr"])) == [7.0, 7.0]


def test_a_step_that_only_one_replica_makes_is_noticed(strategy: Any) -> None:
    model, optimizer = linear(strategy)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        if replica() == 1:
            optimizer.step()

    with pytest.raises(CollectiveMismatchError, match=r"replica 0: no step\n  replica 1: SGD.step at "):
        strategy.run(step)
    assert values(strategy, lambda: model.weight) == [[[0.0, 0.0]]] * 2


def test_modules_of_torch_jit_are_refused(strategy: Any) -> None:
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit: none, DeprecationWarning or FutureWarning, by the version
        model = torch.jit.script(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"Use torch.compile, or start one process for each replica"):
        strategy.run(lambda: model(torch.ones(1, 2)))


@FORMS
def test_a_step_that_raises_on_every_replica_leaves_what_it_leaves_on_one_device(
    strategy: Any, process_model: str
) -> None:
    model, optimizer = linear(strategy)
    model.calls = 0

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.calls += 1
        optimizer.step()
        raise ValueError("after the step")

    for _ in range(2):
        with pytest.raises(ValueError, match="after the step"):
            strategy.run(step)
    assert model.calls == 2
    assert {tuple(v[0]) for v in values(strategy, lambda: model.weight)} == {(-2.0, -2.0)}


def test_attributes_of_a_parameter_are_there_on_every_replica(strategy: Any) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        model.weight.scale = 3.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def scaled() -> torch.Tensor:
        optimizer.zero_grad()
        return torch.tensor(model.weight.scale * getattr(model.weight, "more", 1.0))

    assert values(strategy, scaled) == [3.0, 3.0]
    model.weight.more = 2.0
    assert values(strategy, scaled) == [6.0, 6.0]


class Slotted:
    __slots__ = ("values",)


@pytest.mark.parametrize(("records", "sums"), [(1, {7.0}), (65, {7.0, 14.0})])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_write_to_a_tensor_in_a_slot_is_said_where_replicas_share_it(
    records: int, sums: set[float], elastic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    held = [Slotted() for _ in range(records)]  # many are data, one for all
    for record in held:
        record.values = torch.zeros(7)
    made = (
        tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2))
        if elastic
        else tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    )
    with made as strategy:
        found = strategy.run(lambda: held[0].values.add_(1.0).sum().clone())
        assert set(map(float, strategy.experimental_local_results(found))) == sums
    assert ("shape (7,)" in caplog.text) == (len(sums) > 1)


def test_a_step_that_names_the_default_generator_draws_the_replicas_numbers(strategy: Any) -> None:
    chosen = torch.default_generator
    expected = [torch.rand(6, generator=torch.Generator().manual_seed(5 + r)).tolist() for r in range(2)]
    strategy.seed_replicas(5)
    drawn = [values(strategy, lambda: torch.rand(2, generator=chosen)) for _ in range(3)]
    assert [[number for step in drawn for number in step[r]] for r in range(2)] == expected


class _Asked(dict[str, Any]):
    """As lazy mappings of libraries: what it gives is made, or imported, when it is asked."""

    def __len__(self) -> int:
        raise AssertionError("asked for its length")

    def values(self) -> Any:
        raise AssertionError("asked for its values")


class _LoadsItself(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


def test_looking_for_what_a_step_uses_calls_no_code_of_it(strategy: Any) -> None:
    model, optimizer = linear(strategy)
    table, module = _Asked(model=model), _LoadsItself("lazy")
    holder = types.SimpleNamespace(table=_Asked(), module=module, model=model)

    def step(ask: bool = False) -> float:
        if ask:
            table.values(), module.anything, holder.table.values()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return dict.__getitem__(table, "model").weight.sum().item()

    assert strategy.experimental_local_results(strategy.run(step)) == (-2.0, -2.0)


@pytest.mark.parametrize("folder", ["home/user/.local/lib/python3/site-packages", "usr/lib/python3/dist-packages"])
def test_what_a_library_names_is_its_own_wherever_it_is_installed(strategy: Any, folder: str) -> None:
    """Its globals are shared, as docs/replicas.md says; else torch's own would be taken for the program's."""
    source = "def draw():\n    return generator.get_state().sum() * 0 + torch.rand((), generator=generator)"
    space: dict[str, Any] = {"torch": torch, "generator": torch.Generator().manual_seed(1)}
    exec(compile(source, f"/{folder}/library.py", "exec"), space)
    one, other = values(strategy, space["draw"])
    assert one != other, "the second replica draws the next number of the one generator"


def test_a_dict_that_is_read_in_a_way_of_its_own_is_shared(strategy: Any) -> None:
    model, _ = linear(strategy)
    model.table = _Asked(one=1)
    assert strategy.run(lambda: dict.get(model.table, "one")) == 1
