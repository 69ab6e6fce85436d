"""Hooks and patches of the whole process: there while somebody needs them, and no longer; other libraries' stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core.process_hooks import CountedUsers, DataPatch, Hooks, Patch, install_for

pytestmark = pytest.mark.timeout(60)


class Library:
    """A function that two libraries wrap."""

    @staticmethod
    def function(value: int) -> int:
        return value


OWN = Library.function


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    Library.function = OWN  # type: ignore[method-assign]


def plus_one() -> Patch:
    return Patch(Library, "function", lambda original, value: original(value) + 1)


def test_a_patch_under_the_patch_of_another_library_only_passes_on() -> None:
    patch = plus_one()
    patch.install()
    patch.install()
    ours = Library.function
    Library.function = lambda value: 10 * ours(value)  # type: ignore[method-assign]
    assert Library.function(1) == 20
    patch.uninstall()
    assert Library.function(1) == 20
    patch.uninstall()
    assert Library.function(1) == 10
    assert OWN(1) == 1


def test_a_patch_under_another_one_works_again_when_somebody_needs_it_again() -> None:
    patch = plus_one()
    patch.install()
    ours = Library.function
    Library.function = theirs = lambda value: 10 * ours(value)  # type: ignore[method-assign]
    patch.uninstall()
    patch.install()
    assert Library.function(1) == 11  # once, around theirs; what is below only passes on
    patch.uninstall()
    assert Library.function is theirs


class Counted(Library):
    """With a class method, which knows the class that it is called of."""

    @classmethod
    def made(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value


class Derived(Counted):
    pass


@pytest.mark.parametrize("owner", [Counted, Derived])
def test_a_class_method_is_given_the_class_that_it_is_called_of(owner: type) -> None:
    stored = Counted.__dict__["made"]
    patch = Patch(owner, "made", lambda original, cls, value: original(cls, value + 1))
    patch.install()
    try:
        assert Derived.made(1) == ("Derived", 2)
        assert Derived.made.__name__ == "made"
        assert Counted.made(1) == ("Counted", 2 if owner is Counted else 1)
    finally:
        patch.uninstall()
    assert Counted.__dict__["made"] is stored
    assert "made" not in Derived.__dict__
    assert Derived.made(1) == ("Derived", 1)


def test_a_class_method_of_torch_that_is_written_in_c() -> None:
    class Made(dict[str, int]):
        pass

    patch = Patch(Made, "fromkeys", lambda original, cls, keys, value: original(cls, keys, value + 1))
    patch.install()
    try:
        made = Made.fromkeys("ab", 1)
        assert (type(made), made) == (Made, {"a": 2, "b": 2})
    finally:
        patch.uninstall()
    assert Made.fromkeys("a", 1) == {"a": 1}


def test_a_patch_that_another_library_has_removed_comes_back_with_the_next_user() -> None:
    patch = plus_one()
    patch.install()
    Library.function = OWN  # type: ignore[method-assign]  # what it found when it was installed, before us
    assert Library.function(1) == 1
    patch.install()
    assert Library.function(1) == 2
    patch.uninstall()
    assert Library.function(1) == 2
    patch.uninstall()
    assert Library.function is OWN


def test_two_patches_of_one_function_go_in_any_order() -> None:
    first, second = plus_one(), Patch(Library, "function", lambda original, value: 10 * original(value))
    first.install()
    second.install()
    assert Library.function(1) == 20
    first.uninstall()
    assert Library.function(1) == 10
    second.uninstall()
    assert Library.function(1) == 1


def test_reading_and_setting_data_is_noticed_in_every_thread() -> None:
    seen: list[tuple[int, bool]] = []
    patch = DataPatch(lambda tensor, data: seen.append((tensor.numel(), data is None)))
    parameter, before = nn.Parameter(torch.ones(3)), torch.Tensor.__dict__.get("data")
    patch.install()
    try:
        parameter.data.add_(1)
        parameter.data = torch.zeros(4)
        thread = threading.Thread(target=lambda: parameter.data)
        thread.start()
        thread.join(20)
    finally:
        patch.uninstall()
    assert seen == [(3, False), (4, True), (4, False)]
    assert torch.Tensor.__dict__.get("data") is before  # of a strategy that another test has left, if there is one
    assert parameter.data.tolist() == [0, 0, 0, 0]


def test_classes_of_others_are_called_with_the_accessors_of_torch() -> None:
    accessors, seen, called = torch.Tensor.data, [], []  # as a library may keep them when it is imported

    class Their(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(3).as_subclass(Their)
    patch = DataPatch(lambda *noticed: seen.append(noticed))
    patch.install()
    try:
        assert tensor.data.tolist() == [1, 1, 1]
        tensor.data = torch.zeros(3)
    finally:
        patch.uninstall()
    assert accessors.__get__ in called
    assert accessors.__set__ in called
    assert len(seen) == 2


def test_hooks_go_with_the_last_that_needs_them() -> None:
    class Handle:
        def remove(self) -> None:
            there.remove(self)

    there: list[Handle] = []

    def register() -> Handle:
        there.append(Handle())
        return there[-1]

    hooks = Hooks(register, register, patches=[plus_one()])
    hooks.install()
    hooks.install()
    assert len(there) == 2
    hooks.uninstall()
    assert (len(there), Library.function(1)) == (2, 2)
    hooks.uninstall()
    assert (there, Library.function(1)) == ([], 1)


def test_the_next_user_of_hooks_wraps_what_another_library_has_put_in_the_place_of_a_function() -> None:
    hooks = Hooks(patches=[plus_one()])
    hooks.install()
    Library.function = theirs = lambda value: 10 * value  # type: ignore[method-assign]
    hooks.install()
    assert Library.function(1) == 11
    hooks.uninstall()
    assert Library.function(1) == 11
    hooks.uninstall()
    assert Library.function is theirs


class Owner:
    """Somebody who needs hooks."""


def test_hooks_go_with_their_owner() -> None:
    owner = Owner()
    install_for(owner, [plus_one()])
    assert Library.function(1) == 2
    del owner
    gc.collect()
    assert Library.function(1) == 1


def test_hooks_are_taken_away_once() -> None:
    owner, other = Owner(), plus_one()
    other.install()
    taken = install_for(owner, [other])
    taken()
    taken()
    assert Library.function(1) == 2
    other.uninstall()
    assert Library.function(1) == 1


def wrapped_functions() -> dict[str, Callable[..., Any]]:
    """Everything of torch that a strategy wraps; docs/architecture.md lists it."""
    schedulers = vars(torch.optim.lr_scheduler).values()
    found = {f"{c.__name__}.step": vars(c).get("step") for c in schedulers if isinstance(c, type)}
    found["Tensor.data"] = vars(torch.Tensor).get("data")
    found["Parameter.__deepcopy__"] = vars(nn.Parameter)["__deepcopy__"]
    found["SyncBatchNorm.forward"] = vars(nn.SyncBatchNorm)["forward"]
    found["autograd"] = torch.autograd._engine_run_backward
    return found


@pytest.mark.cpu_only("it counts what one strategy on the CPU wraps")
def test_torch_is_as_it_was_when_the_last_strategy_is_closed() -> None:
    gc.collect()  # of strategies that other tests have forgotten
    before = wrapped_functions()
    first, second = (td.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2))
    changed = {name for name, function in wrapped_functions().items() if function is not before[name]}
    assert {"autograd", "Tensor.data", "Parameter.__deepcopy__", "SyncBatchNorm.forward"} <= changed
    assert {"LRScheduler.step", "ReduceLROnPlateau.step"} <= changed
    first.close()
    assert wrapped_functions() != before
    second.close()
    assert wrapped_functions() == before


@pytest.mark.cpu_only("it counts what one strategy on the CPU wraps")
def test_what_another_library_wraps_around_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came after the first strategy, and goes on working with, after and under the next one."""
    calls: list[str] = []
    first = td.MirroredStrategy(["cpu:0", "cpu:1"])
    ours = torch.autograd._engine_run_backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", theirs)
    first.close()
    assert torch.autograd._engine_run_backward is theirs
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as second:
        with second.scope():
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)

        def step(x: torch.Tensor) -> torch.Tensor:
            model(x).backward()
            assert model.weight.grad is not None
            return model.weight.grad.clone()

        rows = second.experimental_distribute_values_from_function(
            lambda context: torch.full((1, 1), 1.0 + context.replica_id_in_sync_group)
        )
        found = second.experimental_local_results(second.run(step, args=(rows,)))
    assert [g.item() for g in found] == [1.5, 1.5]  # reduced once
    assert calls == ["theirs"] * 2
    assert torch.autograd._engine_run_backward is theirs


def test_a_user_may_go_while_another_one_comes() -> None:
    """The garbage collector ends strategies wherever it runs, so also while another one installs its hooks."""

    class Collected(CountedUsers):
        def _needed(self, first: bool) -> None:
            if not first:
                self.uninstall()

        def _not_needed(self, last: bool) -> None:
            assert not last

    hooks = Collected()
    hooks.install()
    thread = threading.Thread(target=hooks.install, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for a lock that it holds itself"
