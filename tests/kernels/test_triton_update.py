"""Sum and update in one launch, against the reference's sum followed by an optimizer of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_env import DEVICE, IS_INTERPRETED, assert_same, make, misaligned, needs_triton

from tfstyle_dist_kernels import reference
from tfstyle_dist_kernels.triton.triton_update import sum_and_adam, sum_and_sgd

pytestmark = needs_triton
SIZES = [(3, 5), (), (0,), (700,)]


def gradients(n: int, dtype: torch.dtype, seed: int) -> list[list[Tensor]]:
    return [make(n, shape, dtype, seed + position) for position, shape in enumerate(SIZES)]


def start() -> tuple[list[Tensor], list[torch.nn.Parameter]]:
    """The parameters to update, one of them at an odd address, and equal ones for the optimizer of torch."""
    ours = [make(1, shape, seed=50 + position)[0] for position, shape in enumerate(SIZES)]
    ours[0] = misaligned(ours[0])
    return ours, [torch.nn.Parameter(t.clone()) for t in ours]


def torch_step(
    optimizer: torch.optim.Optimizer,
    theirs: list[torch.nn.Parameter],
    rows: list[list[Tensor]],
    order: str,
    divisor: int,
) -> None:
    for parameter, row in zip(theirs, rows, strict=True):
        wide = [t.float() for t in row]
        parameter.grad = getattr(reference, order)(wide, divisor=divisor)
    optimizer.step()


def assert_close(ours: list[Tensor], theirs: list[Any]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_sgd(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours, theirs = start()
    optimizer = torch.optim.SGD(theirs, lr=0.1, foreach=False, **options)
    buffers = [torch.full_like(t, torch.nan) for t in ours] if "momentum" in options else None
    for step, order in enumerate(("add_n", "tree", "accumulate_n")):
        rows = gradients(10, dtype, step)
        torch_step(optimizer, theirs, rows, order, 10)
        sum_and_sgd(rows, ours, buffers, order, lr=0.1, is_first_step=step == 0, divisor=10, **options)
        assert_close(ours, theirs)
        if buffers is not None:
            assert_close(buffers, [optimizer.state[p]["momentum_buffer"] for p in theirs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam(dtype: torch.dtype, kind: type[torch.optim.Adam], weight_decay: float) -> None:
    ours, theirs = start()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    optimizer = kind(theirs, foreach=False, **options)
    means, squares = ([torch.zeros_like(t) for t in ours] for _ in range(2))
    is_decoupled = kind is torch.optim.AdamW
    for step, order in enumerate(("add_n", "tree", "accumulate_n"), start=1):
        rows = gradients(3, dtype, step)
        torch_step(optimizer, theirs, rows, order, 3)
        sum_and_adam(
            rows, ours, means, squares, order, step=step, is_decoupled=is_decoupled, divisor=3, **options
        )  # fmt: skip
        assert_close(ours, theirs)
        assert_close(means, [optimizer.state[p]["exp_avg"] for p in theirs])
        assert_close(squares, [optimizer.state[p]["exp_avg_sq"] for p in theirs])


def test_scale_and_layouts() -> None:
    parameter = make(1, (6, 4))[0].T.contiguous().T
    expected = parameter.clone()
    rows = [make(2, (6, 4), seed=3)]
    scale = torch.tensor([0.25], device=DEVICE)
    sum_and_sgd(rows, [parameter], None, "add_n", lr=0.5, scale=scale)
    assert_same(parameter, expected - 0.5 * (0.25 * (rows[0][0] + rows[0][1])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_wide", [False, True])
def test_half_precision_parameters(dtype: torch.dtype, is_wide: bool) -> None:
    parameter = make(1, 300, dtype)[0]
    rows = [make(4, 300, dtype, seed=7)]
    buffer = torch.zeros(300, dtype=torch.float32 if is_wide else dtype, device=DEVICE)
    expected = parameter.float() - 0.1 * reference.add_n([t.float() for t in rows[0]])
    sum_and_sgd(rows, [parameter], [buffer], "add_n", lr=0.1, momentum=0.9, is_first_step=True)
    unit = torch.finfo(dtype).eps * (1.0 if IS_INTERPRETED else 0.5)  # the interpreter cuts bfloat16 off
    torch.testing.assert_close(parameter.float(), expected, rtol=unit * 1.01, atol=1e-6)


def ones(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(size, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 0.9}, "momentum is 0.9 but there are no momentum buffers"),
        ({"momentum_buffers": [ones(3)]}, "momentum is 0.0 but there are momentum buffers"),
        ({"nesterov": True}, "nesterov needs a momentum and no dampening, not 0.0 and 0.0"),
        ({"momentum": 0.9, "momentum_buffers": []}, "0 tensors of optimizer state for 1 parameters"),
        ({"momentum": 0.9, "momentum_buffers": [ones(4)]}, r"state of parameter 0 has shape \(4,\)"),
        (
            {"momentum": 0.9, "momentum_buffers": [ones(3, torch.float64)]},
            "state of parameter 0 has dtype torch.float64",
        ),
        ({"contributions": [[ones(4)]]}, "tensor 0: "),
        ({"contributions": [[ones(3, torch.float64)]]}, "tensor 0: out has dtype torch.float32"),
        ({"parameters": [torch.ones(6, device=DEVICE)[::2]]}, "a parameter is not dense"),
        ({"order": "sum"}, "order is 'sum'"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    values = {"contributions": [[ones(3)]], "parameters": [ones(3)], "momentum_buffers": None, "order": "add_n"}
    values |= arguments
    with pytest.raises(ValueError, match=message):
        sum_and_sgd(**values, lr=0.1)


def test_refusals_of_adam() -> None:
    with pytest.raises(ValueError, match="step is 0: count from 1"):
        sum_and_adam([[ones(3)]], [ones(3)], [ones(3)], [ones(3)], "add_n", step=0, lr=0.1)
    double = [torch.ones(3, dtype=torch.float64, device=DEVICE) for _ in range(4)]
    with pytest.raises(ValueError, match=r"gradients of torch.float64 have no update"):
        sum_and_adam([[double[0]]], double[1:2], double[2:3], double[3:], "add_n", step=1, lr=0.1)


def test_shared_memory_is_refused() -> None:
    a, b, c, d = (ones(30) for _ in range(4))
    for contributions, parameters, means, squares in [
        ([[a]], [a], [b], [c]),
        ([[a]], [b], [b], [c]),
        ([[a]], [b], [c], [c]),
        ([[a, d[:20]]], [b[:20]], [c[:20]], [d[10:]]),
        ([[a], [a]], [b, b], [c, c], [d, d]),
    ]:
        if contributions[0][0].shape != parameters[0].shape:
            contributions = [[t[:20] for t in contributions[0]]]
        with pytest.raises(ValueError, match="shares memory with another tensor"):
            sum_and_adam(contributions, parameters, means, squares, "add_n", step=1, lr=0.1)
    assert_same(a, torch.ones(30, device=DEVICE))
