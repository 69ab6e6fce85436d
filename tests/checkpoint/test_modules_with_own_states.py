"""Modules that save and load their state in a way of their own: hooks, overridden methods, states that change shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.train import Checkpoint


class Hooked(torch.nn.Module):
    """Saves its weight the other way round and a number beside it; what it computes from the weight is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.norm = torch.nn.BatchNorm1d(3)
        self.calls, self.cache = 0, 0.0
        self.register_state_dict_post_hook(self._after_saving)
        self.register_load_state_dict_pre_hook(self._before_loading)
        self.register_load_state_dict_post_hook(self._after_loading)

    @staticmethod
    def _after_saving(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        turned = state[f"{prefix}weight"].detach().t().contiguous()
        state.update({f"{prefix}calls": torch.tensor(module.calls), f"{prefix}weight": turned})

    @staticmethod
    def _before_loading(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.calls = int(state.pop(f"{prefix}calls"))
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    @staticmethod
    def _after_loading(module: Any, _: Any) -> None:
        module.cache = float(module.weight.detach().sum())

    def fill(self) -> Any:
        with torch.no_grad():
            self.weight.copy_(torch.arange(6.0).reshape(2, 3))
            self.norm.running_mean.fill_(4.0)  # type: ignore[union-attr]
        self.calls = 5
        return self


class OnlyAfter(torch.nn.Linear):
    """Its state is that of torch; after loading it computes something."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.cache = 0.0
        self.register_load_state_dict_post_hook(
            lambda module, _: setattr(module, "cache", float(module.bias.detach().sum()))
        )


class Own(torch.nn.Module):
    """Its state is nested, and has a number in it."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.inner, self.number = torch.nn.Linear(2, 2), number

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"inner": self.inner.state_dict(), "number": self.number}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        self.inner.load_state_dict(state["inner"])
        self.number = state["number"]


class Growing(torch.nn.Module):
    """A list of tensors that grows, as a metric keeps it, and a buffer whose shape is that of what was seen."""

    def __init__(self, *seen: float) -> None:
        super().__init__()
        self.seen = [torch.tensor(value) for value in seen]
        self.register_buffer("ranges", torch.ones(len(seen)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = list(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = state.pop(f"{prefix}seen", self.seen)
        self.ranges.resize_(state[f"{prefix}ranges"].shape)
        super()._load_from_state_dict(state, prefix, *args)


class Exporting(torch.nn.Linear):
    """A method of another name, as those that transformers' models have for adapters, makes no state its own."""

    def export_state_dict(self) -> dict[str, Any]:
        return dict(self.state_dict())


class Refusing(OnlyAfter):
    """Takes nothing."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if not state["bias"].any():  # what it had, given back
            return super().load_state_dict(state, strict, assign)
        super().load_state_dict({"weight": state["weight"]}, strict=False)
        raise RuntimeError("no room for a bias")


def test_hooks_for_saving_and_loading_are_called(tmp_path: Path) -> None:
    path = Checkpoint(model=Hooked().fill()).write(tmp_path / "ckpt")
    model = Hooked()
    Checkpoint(model=model).restore(path).assert_consumed()
    assert (model.calls, model.cache) == (5, 15.0)
    assert torch.equal(model.weight, torch.arange(6.0).reshape(2, 3))


def test_a_hook_that_only_follows_the_loading(tmp_path: Path) -> None:
    path = Checkpoint(model=torch.nn.Sequential(OnlyAfter())).write(tmp_path / "ckpt")
    model = torch.nn.Sequential(OnlyAfter())
    Checkpoint(model=model).restore(path).assert_consumed()
    assert model[0].cache == float(model[0].bias.detach().sum()) != 0


def test_methods_of_its_own(tmp_path: Path) -> None:
    saved = Own(3)
    path = Checkpoint(model=saved).write(tmp_path / "ckpt")
    model = Own()
    Checkpoint(model=model).restore(path).assert_consumed()
    assert model.number == 3
    assert torch.equal(model.inner.weight, saved.inner.weight)


def test_states_that_change_shape(tmp_path: Path) -> None:
    path = Checkpoint(metric=Growing(1.0, 2.0)).write(tmp_path / "ckpt")
    metric = Growing()
    Checkpoint(metric=metric).restore(path).assert_consumed()
    assert torch.stack(metric.seen).tolist() == [1.0, 2.0]
    assert metric.ranges.tolist() == [1.0, 1.0]


def test_what_the_module_did_not_expect_or_find_is_told(tmp_path: Path) -> None:
    path = Checkpoint(model=torch.nn.Sequential(OnlyAfter(), torch.nn.Linear(1, 1))).write(tmp_path / "ckpt")
    status = Checkpoint(model=torch.nn.Sequential(OnlyAfter(), OnlyAfter())).restore
    with pytest.raises(InvalidArgumentError, match=r"model did not take its saved state: (.|\n)*size mismatch"):
        status(path)
    model = torch.nn.ModuleDict({"0": OnlyAfter(), "2": OnlyAfter()})
    told = Checkpoint(model=model).restore(path)
    assert sorted(told.missing) == ["model/2.bias", "model/2.weight"]
    assert sorted(told.unused) == ["model/1.bias", "model/1.weight"]
    told.expect_partial()


def test_a_module_that_refuses_changes_nothing(tmp_path: Path) -> None:
    def build(number: float) -> tuple[Any, ...]:
        module, other, hooked = Refusing(), torch.nn.Linear(1, 1), Hooked()
        with torch.no_grad():
            for tensor in (*module.parameters(), *other.parameters(), hooked.weight):
                tensor.fill_(number)
        return module, other, hooked, Checkpoint(n=number, hooked=hooked, module=module, other=other)

    path = build(1.0)[-1].write(tmp_path / "ckpt")
    module, other, hooked, checkpoint = build(0.0)
    with pytest.raises(InvalidArgumentError, match=r"nothing was changed.*module did not take .* no room for a bias"):
        checkpoint.restore(path)
    assert checkpoint.n == 0
    for tensor in (*module.parameters(), *other.parameters(), hooked.weight):
        assert not tensor.any()


class Stubborn(OnlyAfter):
    """Takes nothing, not even what it had."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        raise RuntimeError("never")


def test_one_that_takes_nothing_back_does_not_hide_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Checkpoint(a=OnlyAfter(), b=Stubborn()).write(tmp_path / "ckpt")
    first = OnlyAfter()
    before = first.weight.detach().clone()
    with pytest.raises(InvalidArgumentError, match=r"was not restored .*b did not take its saved state: never"):
        Checkpoint(a=first, b=Stubborn()).restore(path)
    assert torch.equal(first.weight, before)
    assert "b did not take back what it had" in caplog.text


def test_torch_s_own_modules_are_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> torch.nn.Module:
        attention = torch.nn.MultiheadAttention(4, 2)
        layers = torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 4), attention, Exporting(2, 2)
        return torch.nn.Sequential(*layers)

    saved, model = build(), build()
    path = Checkpoint(model=saved).write(tmp_path / "ckpt")
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    Checkpoint(model=model).restore(path).assert_consumed()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_replicas_get_what_the_hooks_made(tmp_path: Path, replicas: int) -> None:
    path = Checkpoint(model=Hooked().fill()).write(tmp_path / "ckpt")
    strategy = td.MirroredStrategy([f"cpu:{r}" for r in range(replicas)])
    with strategy.scope():
        model = Hooked()
        strategy.run(lambda: model.norm(model.weight).sum().backward())
        Checkpoint(model=model).restore(path).assert_consumed()
        seen = strategy.run(lambda: (model.calls, model.cache, model.weight.tolist(), model.norm.running_mean.tolist()))
    for own in strategy.experimental_local_results(seen):
        assert own == (5, 15.0, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [4.0, 4.0, 4.0])


def test_variables_of_such_a_module(tmp_path: Path) -> None:
    def build(replicas: int) -> tuple[Any, Any]:
        strategy = td.MirroredStrategy([f"cpu:{r}" for r in range(replicas)])
        with strategy.scope():
            model: Any = OnlyAfter()
            model.seen = td.Variable(
                0.0, synchronization=td.VariableSynchronization.ON_READ, aggregation=td.VariableAggregation.SUM
            )
        return strategy, model

    strategy, model = build(3)
    strategy.run(lambda: model.seen.assign_add(torch.tensor(2.0)))
    path = Checkpoint(model=model).write(tmp_path / "ckpt")
    strategy, model = build(2)
    Checkpoint(model=model).restore(path).assert_consumed()
    assert float(model.seen.value()) == 6.0
    assert model.cache == float(model.bias.detach().sum())


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_ranks_end_equal(rank: int, shared_tmp_path: Path) -> None:
    strategy = td.MirroredStrategy()
    with strategy.scope():
        model = Hooked()
    model.fill()
    model.calls = 5 + rank
    checkpoint = Checkpoint(model=model)
    path = checkpoint.write(shared_tmp_path / "ckpt")
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.restore(path).assert_consumed()
    assert (model.calls, model.cache) == (5, 15.0)
    assert torch.equal(model.weight, torch.arange(6.0).reshape(2, 3))


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_ranks_that_differ_in_their_hooks_or_in_what_they_take(rank: int, shared_tmp_path: Path) -> None:
    strategy = td.MirroredStrategy()
    with strategy.scope():
        counting: Any = OnlyAfter()
        counting.seen = td.Variable(
            0.0, synchronization=td.VariableSynchronization.ON_READ, aggregation=td.VariableAggregation.SUM
        )
        plain = torch.nn.Linear(2, 2)
        refusing = OnlyAfter()
    strategy.run(lambda: counting.seen.assign_add(torch.tensor(2.0)))
    objects = {"a": refusing, "b": counting, "c": plain}
    checkpoint = Checkpoint(**objects)
    path = checkpoint.write(shared_tmp_path / "ckpt")
    told = []
    if rank == 0:  # such as for a log
        plain.register_load_state_dict_post_hook(lambda *_: told.append(rank))
    checkpoint.restore(path).assert_consumed()
    assert told == [0] * (rank == 0)
    assert float(counting.seen.value()) == 4.0
    if rank == 1:
        refusing.__class__ = Refusing
    with pytest.raises(InvalidArgumentError, match=r"worker 1: a did not take its saved state: no room for a bias"):
        checkpoint.restore(path)
    assert float(counting.seen.value()) == 4.0  # the workers go on in step


def test_a_lazy_module_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model/0.weight has no shape yet: run the lazy module once before saving"):
        Checkpoint(model=torch.nn.Sequential(torch.nn.LazyLinear(2))).write(tmp_path / "ckpt")
