"""What shares memory for one replica shares memory for each, and what helps a module or an optimizer is its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tfstyle_dist as tfd


@pytest.fixture
def strategy() -> Iterator[tfd.Strategy]:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


def _values(strategy: tfd.Strategy, function: Any) -> list[Any]:
    return list(strategy.experimental_local_results(strategy.run(function)))


class _Keeps(torch.nn.Module):
    """Keeps the data of its weight, and a part of a buffer, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2)
        self.register_buffer("both", torch.ones(4))
        self.table, self.last = self.a.weight.data, self.both[2:]


def test_an_attribute_that_is_data_of_a_parameter_stays_that(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = _Keeps()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model.a(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    assert all(_values(strategy, lambda: torch.equal(model.table, model.a.weight)))
    with torch.no_grad():
        model.a.weight.fill_(5.0)  # in cross-replica context
    assert all(_values(strategy, lambda: torch.equal(model.table, model.a.weight)))


def test_an_attribute_that_is_a_part_of_a_buffer_stays_that(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = _Keeps()

    def step() -> torch.Tensor:
        model.both += 1.0
        return model.last.clone()

    for count in (2.0, 3.0):
        assert [last.tolist() for last in _values(strategy, step)] == [[count, count]] * 2


class _Flat:
    """All values and gradients of a model in one tensor each, of which the parameters have views."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.data = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        torch.nn.utils.vector_to_parameters(self.data, model.parameters())
        self.grad, start = torch.zeros_like(self.data), 0
        for p in model.parameters():
            p.grad = self.grad[start : start + p.numel()].view_as(p)
            start += p.numel()


def test_parameters_and_gradients_that_are_parts_of_one_tensor_stay_that(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
        flat = _Flat(model)

    def step() -> bool:
        flat.grad.zero_()
        replica = tfd.get_replica_context().replica_id_in_sync_group
        F.mse_loss(model(torch.full((3, 2), 1.0 + replica)), torch.zeros(3, 2)).backward()
        flat.data.sub_(flat.grad, alpha=0.1)
        start = flat.data.untyped_storage().data_ptr()
        return all(p.untyped_storage().data_ptr() == start for p in model.parameters())

    before = flat.data.clone()
    for _ in range(3):
        assert all(_values(strategy, step))
    first, second = _values(strategy, lambda: flat.data.clone())
    assert torch.equal(first, second)
    assert not torch.equal(first, before)


class _Counter:
    """Holds no tensor."""

    def __init__(self) -> None:
        self.calls = 0


class _Counted(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counters = [_Counter()]
        self.param_groups[0]["steps"] = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.counters[0].calls += 1
        self.param_groups[0]["steps"].add_(1)
        return super().step(closure)


@pytest.mark.parametrize("kind", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def test_what_helps_a_module_or_an_optimizer_counts_once_for_each_replica(kind: Any) -> None:
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
            model.counter = _Counter()
            optimizer = _Counted(model.parameters(), lr=0.1)

        def step() -> None:
            model.counter.calls += 1
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        for _ in range(3):
            strategy.run(step)
        assert model.counter.calls == 3
        assert optimizer.counters[0].calls == 3
        assert optimizer.param_groups[0]["steps"] == 3


class _ByParameter:
    """What it knows of each parameter begins with the first step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.settings = dict.fromkeys(model.parameters(), "a setting")
        self.state: dict[Any, dict[str, int]] = defaultdict(dict)


def test_an_object_that_has_parameters_as_keys_is_each_replicas_own(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        known = _ByParameter(model)

    def step() -> float:
        model(torch.ones(1, 2)).sum().backward()
        state = known.state[model.weight]
        state["step"] = state.get("step", 0) + 1
        return float(state["step"])

    assert [_values(strategy, step) for _ in range(2)] == [[1, 1], [2, 2]]


class _Shadow:
    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}


def test_averages_of_three_hundred_parameters_are_each_replicas_own(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(150)])
        shadow = _Shadow(model)

    def step() -> float:
        for kept in shadow.shadow.values():
            kept.fill_(kept[0].item() + 1.0) if kept.dim() == 1 else kept.zero_()
        return float(shadow.shadow["0.bias"] - start)

    start = shadow.shadow["0.bias"].item()
    assert [_values(strategy, step) for _ in range(2)] == [pytest.approx([n, n]) for n in (1.0, 2.0)]


def test_what_a_kept_view_is_written_to_between_runs_reaches_all_replicas() -> None:
    class Holder:
        def __init__(self) -> None:
            self.layer = torch.nn.Linear(3, 2)
            self.row = self.layer.weight.data[0]

    strategy = tfd.MirroredStrategy(["cpu:0", "cpu:1"])
    try:
        with strategy.scope():
            holder = Holder()

        def step() -> torch.Tensor:
            return holder.layer.weight.detach().clone()

        strategy.run(step)
        for _ in range(2):
            holder.row.mul_(0.5)
            first, second = strategy.experimental_local_results(strategy.run(step))
            assert torch.equal(first, holder.layer.weight)
            assert torch.equal(second, first)
    finally:
        strategy.close()


def _write_and_move(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.fill_(5.0)  # in the memory of which there are views
    weight.data = torch.full_like(weight, 7.0)


def test_a_view_of_memory_that_a_parameter_has_left(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    model.row, model.rows = model.weight.data[0], {"all": [model.weight.data]}
    _values(strategy, lambda: None)
    _write_and_move(model.weight)
    assert _values(strategy, lambda: model.row.tolist()) == [[5.0, 5.0]] * 2
    assert all(_values(strategy, lambda: bool((model.rows["all"][0] == 5.0).all())))
    assert all(_values(strategy, lambda: bool((model.weight == 7.0).all())))


def test_a_parameter_in_memory_that_another_has_left(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.weight.data = one.weight.data
    _values(strategy, lambda: None)
    _write_and_move(one.weight)
    assert all(_values(strategy, lambda: bool((other.weight == 5.0).all())))
    assert all(_values(strategy, lambda: bool((one.weight == 7.0).all())))


@pytest.mark.parametrize("in_step", [False, True])
def test_memory_of_all_parameters_that_is_written_to_between_runs(strategy: tfd.Strategy, in_step: bool) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
        if not in_step:
            model.flat = _Flat(model).data

    def step() -> None:
        if in_step:
            model.flat = _Flat(model).data  # each replica makes its own

    strategy.run(step)
    model.flat.fill_(3.0)
    assert all(_values(strategy, lambda: bool((model.weight == 3.0).all() and (model.bias == 3.0).all())))


def test_parts_in_a_list_that_are_written_to_between_runs(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
        model.parts = [torch.zeros(4)]
        model.parts.append(model.parts[0][:2])
    _values(strategy, lambda: None)
    model.parts[1].fill_(2.0)
    assert _values(strategy, lambda: model.parts[0].tolist()) == [[2.0, 2.0, 0.0, 0.0]] * 2
    assert all(_values(strategy, lambda: model.parts[0].add_(1.0)[:2].equal(model.parts[1])))


def test_a_gradient_that_is_kept(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)

    def step() -> bool:
        replica = tfd.get_replica_context().replica_id_in_sync_group
        model(torch.full((3, 2), 1.0 + replica)).sum().backward()
        return not hasattr(model, "kept") or torch.equal(model.kept, model.weight.grad)

    _values(strategy, step)
    model.kept = model.weight.grad
    assert all(_values(strategy, step))
    model.kept.fill_(0.0)
    assert all(_values(strategy, lambda: not model.weight.grad.any()))


def test_a_parameter_that_gets_the_memory_of_another(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    _values(strategy, lambda: None)
    other.weight.data = one.weight.data
    assert all(_values(strategy, lambda: one.weight.data.add_(1.0).equal(other.weight.data)))


def test_a_parameter_that_is_made_of_a_part_of_another(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    _values(strategy, lambda: None)
    model.row = torch.nn.Parameter(model.weight.data[1])
    assert all(_values(strategy, lambda: model.weight.data.add_(1.0)[1].equal(model.row.data)))


def test_a_buffer_that_gets_other_memory_leaves_its_views_behind(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Module()
        model.register_buffer("both", torch.zeros(4))
        model.part = model.both[:2]
    _values(strategy, lambda: None)
    model.both.data = torch.ones(4)
    assert _values(strategy, lambda: [model.both.sum().item(), model.part.sum().item()]) == [[4.0, 0.0]] * 2


def test_what_cannot_be_written_in_place_is_copied(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Module()
        model.register_buffer("one", torch.zeros(1))
        model.many = model.one.expand(3)
    _values(strategy, lambda: None)
    model.one.fill_(2.0)
    assert _values(strategy, lambda: [model.one.item(), *model.many.tolist()]) == [[2.0] * 4] * 2


def test_a_view_of_a_parameter_in_memory_that_it_has_just_got(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    _values(strategy, lambda: None)
    torch.nn.utils.vector_to_parameters(torch.arange(6.0), model.parameters())
    model.row = model.weight.data[1]
    assert all(_values(strategy, lambda: model.weight.data.add_(1.0)[1].equal(model.row)))


def test_an_optimizer_of_a_step_that_goes_on_with_other_parameters(strategy: tfd.Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2, bias=False)

    def step() -> None:
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    strategy.run(step)
    model.load_state_dict({"weight": torch.full((2, 2), 2.0)}, assign=True)
    model.optimizer.param_groups[0]["params"] = [model.weight]
    strategy.run(lambda: None)
    assert bool((model.weight == 2.0).all())
    assert all(_values(strategy, lambda: bool((model.weight == 2.0).all())))


@pytest.mark.parametrize("kind", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def test_a_view_that_a_step_keeps_sees_later_updates(kind: Any) -> None:
    """On devices the one copy of central storage is on the CPU, and each replica computes with another one."""
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
            optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, other)]
        with torch.no_grad():
            model.weight.fill_(5.0)
            other.weight.fill_(1.0)

        def step() -> tuple[float, float, float]:
            if not hasattr(model, "kept"):
                model.kept = model.weight.detach()
            x = torch.ones(1, 2, device=model.weight.device)
            losses = model(x).sum(), other(x).pow(2).sum()
            for loss, optimizer in zip(losses, optimizers, strict=True):  # the second after the first one's update
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return float(model.kept.sum()), model.weight.sum().item(), other.weight.sum().item()

        for number in range(1, 4):
            for kept, weights, others in zip(
                *map(strategy.experimental_local_results, strategy.run(step)), strict=True
            ):
                assert kept == weights == 10 - 2 * number
                assert others == 2 * (-3) ** number
