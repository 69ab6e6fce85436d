"""The private names of torch that are used: what each must do, so that a new torch shows what would break."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.torch_internals import DataPatch, Patch


def test_insides_are_exchanged_and_graphs_stay_with_theirs() -> None:
    parameter, vessel = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    first = (parameter * 3).sum()
    torch_internals.swap_insides(parameter, vessel)
    assert parameter.tolist() == [0, 0]
    second = (parameter * 5).sum()
    with torch.no_grad():
        parameter.add_(1)
    assert (parameter._version, vessel._version) == (1, 0)
    torch_internals.swap_insides(parameter, vessel)
    second.backward()
    assert parameter.grad is None
    assert vessel.grad is not None
    assert vessel.grad.tolist() == [5, 5]
    first.backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 3]


def test_what_cannot_be_exchanged_raises() -> None:
    parameter, vessel = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    reference = torch._C._WeakTensorRef(parameter)
    with pytest.raises(RuntimeError, match="weakrefs"):
        torch_internals.swap_insides(parameter, vessel)
    assert parameter.tolist() == [1, 1]
    del reference


def test_the_number_of_the_backward_pass_under_way() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    (x * 2).register_hook(lambda g: None)
    y = x * 2
    y.register_hook(lambda g: seen.append(torch_internals.backward_pass_under_way()))
    y.sum().backward()
    assert seen[0] >= 0
    assert torch_internals.backward_pass_under_way() == -1


def test_a_lazy_clone_is_a_copy_as_soon_as_one_writes() -> None:
    first = torch.arange(4.0)
    second, third = torch_internals.lazy_clone(first), torch_internals.lazy_clone(first)
    first.mul_(2)
    third.add_(1)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([0, 2, 4, 6], [0, 1, 2, 3], [1, 2, 3, 4])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_every_form_of_backward_and_grad_calls_the_engine_through_one_function() -> None:
    calls: list[Any] = []

    def note(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((args[3], kwargs["accumulate_grad"]))
        return original(*args, **kwargs)

    patch = Patch(torch.autograd, torch_internals.RUN_BACKWARD, note)
    x = torch.ones(2, requires_grad=True)
    from torch.autograd import backward as imported_early

    patch.install()
    try:
        (x * 2).sum().backward()
        (x * x).sum().backward(create_graph=True, inputs=[x])
        torch.autograd.backward([(x * 2).sum()])
        imported_early([(x * 2).sum()])
        torch.autograd.grad((x * 2).sum(), x)
    finally:
        patch.uninstall()
        x.grad = None
    assert calls == [(False, True), (True, True), (False, True), (False, True), (False, False)]
    (x * 2).sum().backward()
    assert len(calls) == 5


def test_a_patch_under_the_patch_of_another_library_only_passes_on() -> None:
    class Library:
        @staticmethod
        def function(value: int) -> int:
            return value

    own = Library.function
    patch = Patch(Library, "function", lambda original, value: original(value) + 1)
    patch.install()
    patch.install()
    ours = Library.function
    Library.function = lambda value: 10 * ours(value)  # type: ignore[assignment,method-assign]
    assert Library.function(1) == 20
    patch.uninstall()
    assert Library.function(1) == 20
    patch.uninstall()
    assert Library.function(1) == 10
    assert own(1) == 1


def test_reading_data_is_noticed_in_every_thread() -> None:
    seen: list[int] = []
    patch = DataPatch(lambda parameter: seen.append(parameter.numel()))
    parameter = nn.Parameter(torch.ones(3))
    patch.install()
    try:
        parameter.data.add_(1)
        parameter.data = torch.zeros(4)
        thread = threading.Thread(target=lambda: parameter.data)
        thread.start()
        thread.join(20)
    finally:
        patch.uninstall()
    assert seen == [3, 4]
    assert "data" not in nn.Parameter.__dict__
    assert parameter.data.tolist() == [0, 0, 0, 0]
