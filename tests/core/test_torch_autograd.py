"""What the package needs of torch's autograd beyond its documentation (``core/torch_internals.py``)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.process_hooks import Patch


def test_insides_are_exchanged_and_graphs_stay_with_theirs() -> None:
    parameter, vessel = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    first = (parameter * 3).sum()
    torch_internals.swap_insides(parameter, vessel)
    assert parameter.tolist() == [0, 0]
    second = (parameter * 5).sum()
    with torch.no_grad():
        parameter.add_(1)
    assert [torch_internals.version_of(t) for t in (parameter, vessel)] == [1, 0]
    torch_internals.set_versions((parameter,), (5,))
    assert [torch_internals.version_of(t) for t in (parameter, vessel)] == [5, 0]
    torch_internals.set_versions((parameter,), (1,))
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_frames_of_the_engine_have_its_name(reentrant: bool) -> None:
    def depth() -> int:
        frame, found = sys._getframe(), 0
        while frame is not None:
            found += frame.f_code.co_name == torch_internals.RUN_BACKWARD
            frame = frame.f_back  # type: ignore[assignment]
        return found

    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        out = value * 2
        if out.requires_grad:
            out.register_hook(lambda g: seen.append(depth()))
        return out

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert seen[-1] == 1 + reentrant


def test_the_end_of_the_backward_pass() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def note(parameter: torch.Tensor) -> None:
        order.append("gradient")
        torch_internals.queue_end_of_backward(lambda: order.append(f"end {parameter.grad is not None}"))

    x.register_post_accumulate_grad_hook(note)
    y = x * 2
    x.register_hook(lambda g: order.append("hook"))
    y.sum().backward()
    assert order == ["hook", "gradient", "end True"]


def test_writes_are_counted_but_those_to_data() -> None:
    x = torch.ones(4)
    first = torch_internals.version_of(x)
    x[1:].add_(1)
    assert torch_internals.version_of(x) == torch_internals.version_of(x[:1]) == first + 1
    x.data.add_(1)
    assert torch_internals.version_of(x) == first + 1


def test_hooks_are_where_they_are_put() -> None:
    source, target = (torch.ones(1, requires_grad=True) for _ in range(2))
    assert torch_internals.hooks_of(source) == (None, None)
    seen: list[str] = []
    source.register_hook(lambda g: seen.append("hook"))
    source.register_post_accumulate_grad_hook(lambda p: seen.append("gradient"))
    for name, hooks in zip(torch_internals.HOOKS, torch_internals.hooks_of(source), strict=True):
        assert len(hooks) == 1
        setattr(target, name, type(hooks)(hooks))
    (target * 2).sum().backward()
    assert seen == ["hook", "gradient"]
    assert source.grad is None


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
